// Command report writes BENCHMARKS.md from the raw output of `go test -bench`.
//
//	go run ./bench/report bench/results/RUN... > BENCHMARKS.md
//
// RUN is a folder with one file a round, all of one sitting on one machine; each
// run has a part of its own, and nothing of one is compared with another's. The
// report gives medians with the least and the greatest of the rounds, and their
// ratios to the paths of the same rounds that they are compared with. Nothing in
// it is typed by hand.
package main

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: report RUN-FOLDER...")
		os.Exit(2)
	}
	var runs []*run
	for _, dir := range os.Args[1:] {
		r, err := readRun(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "report:", err)
			os.Exit(1)
		}
		runs = append(runs, r)
	}
	fmt.Print("# Benchmarks\n\nWritten by `bench/report` from the raw output in `bench/results`; `make bench` makes both anew.\n" +
		"Median (least to greatest) of the rounds of one sitting. × is the ratio of medians: to loopback, the kernel's without a relay, or else to the path named.\n")
	for _, r := range runs {
		r.write(os.Stdout)
	}
}

// A run is all rounds of one sitting.
type run struct {
	name   string
	rounds int
	config []string             // "key: value" lines, in the order seen
	values map[result][]float64 // one a round
}

// A result is one metric of one benchmark.
type result struct{ family, params, path, unit string }

func readRun(dir string) (*run, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no rounds (*.txt) in %s", dir)
	}
	r := &run{name: filepath.Base(dir), rounds: len(files), values: make(map[result][]float64)}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		err = r.read(f)
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return r, nil
}

// read takes in one round.
func (r *run) read(in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line := lines.Text()
		if !strings.HasPrefix(line, "Benchmark") {
			if key, _, ok := strings.Cut(line, ": "); ok && !strings.ContainsAny(key, " \t") && !slices.Contains(r.config, line) {
				r.config = append(r.config, line)
			}
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 4 {
			continue // a name on a line of its own
		}
		name := fields[0]
		if i := strings.LastIndexByte(name, '-'); i > 0 {
			name = name[:i] // GOMAXPROCS
		}
		family, rest, _ := strings.Cut(strings.TrimPrefix(name, "Benchmark"), "/")
		res := result{family: family}
		var params []string
		for p := range strings.SplitSeq(rest, "/") {
			if path, ok := strings.CutPrefix(p, "path="); ok {
				res.path = path
			} else if p != "" {
				params = append(params, p)
			}
		}
		res.params = strings.Join(params, " ")
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			res.unit = fields[i+1]
			if res.unit != "ns/op" || v != 0 {
				r.values[res] = append(r.values[res], v)
			}
		}
	}
	return lines.Err()
}

// compared are the paths that the others of the same table are compared with: the
// first one there is, and with more than one each of them.
var compared = []string{"loopback", "qemu-user", "culvert-stream"}

func (r *run) write(w io.Writer) {
	fmt.Fprintf(w, "\n## Run %s: %d rounds\n\n", r.name, r.rounds)
	for _, c := range r.config {
		fmt.Fprintf(w, "- %s\n", c)
	}
	keys := slices.Collect(maps.Keys(r.values))
	families := sorted(keys, func(k result) string { return k.family })
	for _, family := range families {
		ofFamily := slices.DeleteFunc(slices.Clone(keys), func(k result) bool { return k.family != family })
		units := sorted(ofFamily, func(k result) string { return k.unit })
		params := sorted(ofFamily, func(k result) string { return k.params })
		paths := sorted(ofFamily, func(k result) string { return k.path })
		slices.SortStableFunc(paths, func(a, b string) int { return rank(a) - rank(b) })
		for _, unit := range units {
			fmt.Fprintf(w, "\n### %s, %s\n\n| |", family, unit)
			for _, p := range paths {
				fmt.Fprintf(w, " %s |", p)
			}
			fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---|", len(paths)))
			for _, param := range params {
				fmt.Fprintf(w, "| %s |", param)
				for i, p := range paths {
					fmt.Fprintf(w, " %s |", r.cell(result{family, param, p, unit}, paths[:i]))
				}
				fmt.Fprintln(w)
			}
		}
	}
}

// rank puts first what the others are compared with.
func rank(path string) int {
	if i := slices.Index(compared, path); i >= 0 {
		return i
	}
	return len(compared)
}

// cell shows the rounds of one result, beside those of the paths before it that
// it is compared with.
func (r *run) cell(res result, before []string) string {
	v := r.values[res]
	if len(v) == 0 {
		return "–"
	}
	s := fmt.Sprintf("%s (%s to %s)", number(median(v)), number(slices.Min(v)), number(slices.Max(v)))
	for _, p := range before {
		base := r.values[result{res.family, res.params, p, res.unit}]
		if !slices.Contains(compared, p) || len(base) == 0 || median(base) == 0 {
			continue
		}
		s += fmt.Sprintf(" ×%.2f", median(v)/median(base))
		if p != compared[0] {
			s += " " + p
		}
	}
	return s
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

func number(v float64) string {
	if v >= 1000 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// sorted returns the different values of key, in order: numbers in names by
// their worth.
func sorted(keys []result, key func(result) string) []string {
	seen := make(map[string]bool)
	for _, k := range keys {
		seen[key(k)] = true
	}
	return slices.SortedFunc(maps.Keys(seen), natural)
}

func natural(a, b string) int {
	if len(a) != len(b) {
		if c := strings.Compare(strings.TrimRight(a, "0123456789"), strings.TrimRight(b, "0123456789")); c != 0 {
			return c
		}
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}
