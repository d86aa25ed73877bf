# What people type. The two that matter: `make demo` and `make test`.

CACHE := $(or $(CULVERT_CACHE),$(XDG_CACHE_HOME:%=%/culvert),$(HOME)/.cache/culvert)
# Where install-deps.sh puts Go when the distribution's is too old, and where go.dev says to.
export PATH := $(CACHE)/go/bin:$(PATH):/usr/local/go/bin

LINT_VERSION := v2.12.2
LINT := $(CACHE)/bin/golangci-lint-$(LINT_VERSION)
# Its cache names files: one for each checkout, or what it says of one stands in for another.
export GOLANGCI_LINT_CACHE := $(CACHE)/lint$(subst /,-,$(CURDIR))

# What a skip must not hide when the whole suite runs: see CULVERT_TEST_REQUIRE in README.md.
REQUIRE := netns,tun,qemu,dpdk,rawsocket,dockerd,engine,kube,dig,tshark
FUZZTIME ?= 10s

.PHONY: build check lint test demo bench bench-peers bench-smoke fuzz clean need-go

build: need-go
	CGO_ENABLED=0 go build -trimpath -o bin/culvert ./cmd/culvert

need-go:
	@go list -m >/dev/null || { \
		echo 'culvert needs Go 1.26, or any Go from 1.21, which fetches it by itself;' >&2; \
		echo '"contrib/install-deps.sh build" installs it, and so does https://go.dev/dl/' >&2; exit 1; }

# The everyday part: no root, no VM.
check: need-go $(LINT)
	@out=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); [ -z "$$out" ] || { echo "gofmt: $$out" >&2; exit 1; }
	@for f in contrib/*.sh contrib/*/*.sh .ci/run; do bash -n $$f || exit 1; done
	go vet ./...
	GOOS=darwin GOARCH=arm64 go build ./...
	GOOS=darwin GOARCH=arm64 go vet ./...
	$(LINT) run ./...
	go test -short ./...

lint: need-go $(LINT)
	$(LINT) run ./...

# Built once and kept outside the tree; the file's name is its version.
$(LINT):
	GOBIN=$(CACHE)/bin/build go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	mv $(CACHE)/bin/build/golangci-lint $@

# Everything there is, on a machine that has nothing yet. The race detector goes over everything but the suites
# whose guest runs under emulation: there it doubles the daemon's work and finds what it finds over the tap.
test:
	contrib/install-deps.sh test
	$(MAKE) check
	contrib/guest/build.sh
	contrib/engine/build.sh
	contrib/kube/build.sh
	CULVERT_TEST_REQUIRE=$(REQUIRE) go test -race -timeout 30m -skip '^Test(Suite(QEMU|Unixgram|VhostUser)|ContainersQEMU)' ./...
	CULVERT_TEST_REQUIRE=$(REQUIRE) go test -count=1 -timeout 45m -run '^Test(Suite|ContainersQEMU)' ./cmd/culvert
	$(MAKE) bench-smoke

# ATTACH=vhost-user shows that attachment instead of QEMU's socket.
demo:
	contrib/install-deps.sh demo
	contrib/demo.sh

# Real numbers take a quiet machine and most of an hour: whole rounds one after the other, so that a bad minute
# spoils every row alike. Raw output is kept; BENCHMARKS.md is written from it.
# BENCH picks among the benchmarks, and RUNS names folders of earlier sittings whose figures stay in it.
ROUNDS ?= 7
BENCH ?= .
RUNS ?=
bench: need-go
	contrib/install-deps.sh bench
	@set -e; dir=bench/results/$$(date +%F)-$$(git rev-parse --short HEAD); mkdir -p $$dir; \
	go test -c -o $$dir/bench.test ./bench; trap 'rm -f '$$dir'/bench.test' EXIT; \
	for i in $$(seq $(ROUNDS)); do echo "round $$i of $(ROUNDS)"; \
		(cd bench && ../$$dir/bench.test -test.run '^$$' -test.bench '$(BENCH)' -test.benchtime 1x -test.timeout 20m) > $$dir/round-$$i.txt; done; \
	go run ./bench/report $(RUNS) $$dir > BENCHMARKS.md

# What others do on the same machine in the same minutes: at a second a cell a round takes about two and a half. A
# peer that is missing or, tried twice, cannot do a thing is left out with a line that says why. Memory is
# measured once: it does not depend on how busy the machine is.
PEERS ?= TCPStream|PingPong|Connect|UDP
PEERS_ONCE ?= IdleFlow|Publish|PublishCommand
bench-peers: need-go
	contrib/install-deps.sh bench
	@set -e; dir=bench/results/$$(date +%F)-$$(git rev-parse --short HEAD)-peers; mkdir -p $$dir; \
	go test -c -o $$dir/bench.test ./bench; trap 'rm -f '$$dir'/bench.test' EXIT; \
	what='$(PEERS)|$(PEERS_ONCE)'; \
	for i in $$(seq $(ROUNDS)); do echo "round $$i of $(ROUNDS)"; \
		(cd bench && CULVERT_BENCH_PEERS=1 CULVERT_BENCH_SECONDS=1 ../$$dir/bench.test -test.run '^$$' \
			-test.bench "^Benchmark($$what)\$$" -test.benchtime 1x -test.timeout 10m) > $$dir/round-$$i.txt; what='$(PEERS)'; done; \
	go run ./bench/report $(RUNS) $$dir > BENCHMARKS.md

# Of the peers only that each passes a byte.
bench-smoke: need-go
	contrib/install-deps.sh bench
	CULVERT_BENCH_SECONDS=1 go test -run '^$$' -bench . -benchtime 1x -timeout 20m ./bench
	CULVERT_BENCH_SECONDS=1 CULVERT_BENCH_PEERS=1 go test -run '^$$' -bench '^BenchmarkPingPong$$' -benchtime 1x ./bench

# Each fuzz target for FUZZTIME: go test takes one at a time.
fuzz: need-go
	@go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | while read -r pkg; do \
		for f in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
			echo "$$pkg $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$pkg || exit 1; \
		done; \
	done

clean:
	rm -rf bin
