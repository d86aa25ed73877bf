package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

const peers = "BenchmarkTCP/path=pasta-tap-2 1 10 Gbit/s 0 loss-%\nBenchmarkTCP/path=culvert-tap-2 1 12 Gbit/s 0 loss-% 3 slowest-Gbit/s\n"

func TestVerdict(t *testing.T) {
	rate, loss, slowest := tap("TCP", "", "Gbit/s"), tap("TCP", "", "loss-%"), tap("TCP", "", "slowest-Gbit/s")
	fairShare := target{"", slowest, rate, "its fair share", 2, atLeast, 0.5} // of two flows: 3/(12/2)
	tooFair := fairShare
	tooFair.bound = 0.51
	for _, c := range []struct {
		name             string
		target           target
		met              bool
		demand, measured string
	}{
		{"met to the digit", against("pasta-tap", "", rate, atLeast, 1.2), true, "≥ 1.2 × pasta-tap", "×1.2: 12 against 10 Gbit/s"},
		{"not met", against("pasta-tap", "", rate, atLeast, 1.21), false, "≥ 1.21 × pasta-tap", "×1.2: 12 against 10 Gbit/s"},
		{"at most", against("pasta-tap", "", rate, atMost, 1.2), true, "≤ 1.2 × pasta-tap", "×1.2: 12 against 10 Gbit/s"},
		{"more than most", against("pasta-tap", "", rate, atMost, 1.1), false, "≤ 1.1 × pasta-tap", "×1.2: 12 against 10 Gbit/s"},
		{"nothing against nothing", against("pasta-tap", "", loss, atMost, 1), true, "≤ 1 × pasta-tap", "0 against 0 %"},
		{"scaled", fairShare, true, "≥ 0.5 × its fair share", "×0.5: 3 against 12 Gbit/s"},
		{"scaled, not met", tooFair, false, "≥ 0.51 × its fair share", "×0.5: 3 against 12 Gbit/s"},
		{"absolute", within("", rate, 12, "Gbit/s"), true, "≤ 12 Gbit/s", "12 Gbit/s"},
		{"absolute, not met", within("", rate, 11.9, "Gbit/s"), false, "≤ 11.9 Gbit/s", "12 Gbit/s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := c.target.judge([]*run{mustRun(t, "x", peers)})
			assert.NotNil(t, v.run)
			assert.Equal(t, c.met, v.met)
			assert.Equal(t, c.demand, c.target.demand())
			assert.Equal(t, c.measured, c.target.measured(v))
		})
	}
}

func TestLastRunWithAllFigures(t *testing.T) {
	first := mustRun(t, "first", peers)
	second := mustRun(t, "second", strings.ReplaceAll(peers, " 12 ", " 9 "))
	alone := mustRun(t, "alone", "BenchmarkTCP/path=culvert-tap-2 1 99 Gbit/s\n")
	goal := against("pasta-tap", "", tap("TCP", "", "Gbit/s"), atLeast, 1)
	assert.Equal(t, "first", goal.judge([]*run{first}).run.name)
	v := goal.judge([]*run{first, second, alone}) // nothing of one is compared with another's
	assert.Equal(t, "second", v.run.name)
	assert.False(t, v.met)
	assert.Nil(t, goal.judge([]*run{alone}).run)
	assert.Nil(t, goal.judge([]*run{mustRun(t, "still", strings.ReplaceAll(peers, " 10 ", " 0 "))}).run, "a peer that did nothing")
}

func TestPromoted(t *testing.T) {
	rate := tap("TCP", "", "Gbit/s")
	p, ok := against("pasta-tap", "", rate, atLeast, 1).promoted()
	assert.True(t, ok)
	assert.Equal(t, rate.of(promotedPath), p.value)
	assert.Equal(t, rate.of("path=pasta-tap"), p.base, "the peer's")

	p, ok = flowsTogether("host-to-guest", 8)[0].promoted()
	assert.True(t, ok)
	assert.Equal(t, stream("host-to-guest", 1, "Gbit/s").of(promotedPath), p.base, "one flow of its own")

	p, ok = within("", rate, 1, "Gbit/s").promoted()
	assert.True(t, ok)
	assert.False(t, p.relative())

	for _, other := range []target{traced("off", "", 1)[0], wrapped(60, 1)[0], within("", command("MB"), 60, "MB")} {
		_, ok := other.promoted()
		assert.False(t, ok, other.value)
	}
	for _, t2 := range targets {
		p, ok := t2.promoted()
		assert.Equal(t, t2.value.subject == "path=culvert-tap", ok, t2.title)
		assert.NotEqual(t, ownPath, p.base.subject, t2.title)
	}
}

func TestWriteTargets(t *testing.T) {
	rate := tap("TCP", "", "Gbit/s")
	list := []target{
		against("pasta-tap", "good", rate, atLeast, 1), against("pasta-tap", "bad", rate, atLeast, 2), against("gvproxy", "unknown", rate, atLeast, 20),
		within("daemon's", command("MB"), 60, "MB"),
	}
	first := mustRun(t, "X", peers+"BenchmarkTCP/path=culvert-tap-promoted-2 1 8 Gbit/s\n")
	first.notes = "why"
	second := mustRun(t, "Y", "BenchmarkTCP/path=pasta-tap-2 1 10 Gbit/s\nBenchmarkTCP/path=culvert-tap-promoted-2 1 20 Gbit/s\n"+
		"BenchmarkPublishCommand/path=culvert/ports=10000-2 1 61 MB\n")
	for _, c := range []struct {
		name string
		runs []*run
		want []string
	}{
		{"netstack alone", []*run{mustRun(t, "X", peers)}, []string{
			"\nDefault: 0 met, 0 not met, 4 not measured; with `tcp: netstack`: 1 met, 1 not met, 1 not measured. ",
			"| good | ≥ 1 × pasta-tap | – | not measured | ×1.2: 12 against 10 Gbit/s | met | [X](#run-x) |\n",
			"| unknown | ≥ 20 × gvproxy | – | not measured | – | not measured | |\n",
			"| daemon's | ≤ 60 MB | – | not measured | | | |\n",
		}},
		{"both of one run", []*run{first}, []string{
			"\nDefault: 0 met, 2 not met, 2 not measured; with `tcp: netstack`: 1 met, 1 not met, 1 not measured. ",
			"| good | ≥ 1 × pasta-tap | ×0.8: 8 against 10 Gbit/s | **not met** | ×1.2: 12 against 10 Gbit/s | met | [X](#run-x) |\n",
			"\n### Notes on run X\n\nwhy\n",
		}},
		{"each of its last run", []*run{first, second}, []string{
			"\nDefault: 2 met, 1 not met, 1 not measured; with `tcp: netstack`: 1 met, 1 not met, 1 not measured. ",
			"| bad | ≥ 2 × pasta-tap | ×2: 20 against 10 Gbit/s | met | ×1.2: 12 against 10 Gbit/s | **not met** | [Y](#run-y), [X](#run-x) |\n",
			"| daemon's | ≤ 60 MB | 61 MB | **not met** | | | [Y](#run-y) |\n",
		}},
	} {
		var out strings.Builder
		writeTargets(&out, list, c.runs)
		for _, want := range c.want {
			assert.Contains(t, out.String(), want, c.name)
		}
	}
	var out strings.Builder
	writeTargets(&out, list, []*run{mustRun(t, "other", "BenchmarkVM-2 1 1 Gbit/s\n")})
	assert.Empty(t, out.String(), "a run of something else")
}
