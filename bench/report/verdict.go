package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// A verdict is what a run says of a target.
type verdict struct {
	run         *run // nil: none has measured it
	value, base float64
	met         bool
}

// judge takes the last run that measured all that the target needs.
func (t target) judge(runs []*run) (v verdict) {
	for _, r := range runs {
		value, ok := r.median(t.value)
		base := 1.0
		if ok && t.relative() {
			base, ok = r.median(t.base)
			ok = ok && (base != 0 || t.rel == atMost) // at least nothing is no demand
		}
		if ok {
			v = verdict{run: r, value: value, base: base}
		}
	}
	// Multiplied, not divided: a peer that loses nothing has 0.
	limit, value := t.bound*v.base, v.value*t.scale
	v.met = t.rel == atLeast && value >= limit || t.rel == atMost && value <= limit
	return v
}

func (t target) relative() bool { return t.base != result{} }

// demand is the bound in words.
func (t target) demand() string {
	if !t.relative() {
		return fmt.Sprintf("%s %s %s", t.rel, number(t.bound), t.than)
	}
	return fmt.Sprintf("%s %s × %s", t.rel, number(t.bound), t.than)
}

// measured is the figure in the demand's terms, with a digit more than bounds
// have, and the medians that it is of.
func (t target) measured(v verdict) string {
	if v.run == nil {
		return orDash("")
	}
	unit := t.value.unit
	if i := strings.IndexByte(unit, '-'); i >= 0 && !strings.HasPrefix(unit, "cpu-") {
		unit = unit[i+1:] // p50-µs: the title has the rest
	}
	if !t.relative() {
		return rounded(v.value, 4) + " " + t.than
	}
	medians := fmt.Sprintf("%s against %s %s", number(v.value), number(v.base), unit)
	if v.base == 0 {
		return medians
	}
	return "×" + rounded(t.scale*v.value/v.base, 4) + ": " + medians
}

// A tally counts verdicts.
type tally struct{ met, missed, unknown int }

// add counts v and returns it in words.
func (c *tally) add(v verdict) string {
	switch {
	case v.run == nil:
		c.unknown++
		return "not measured"
	case v.met:
		c.met++
		return "met"
	default:
		c.missed++
		return "**not met**"
	}
}

func (c *tally) String() string {
	return fmt.Sprintf("%d met, %d not met, %d not measured", c.met, c.missed, c.unknown)
}

// writeTargets writes the verdicts, if there is one, and the runs' notes.
func writeTargets(w io.Writer, targets []target, runs []*run) {
	var rows strings.Builder
	var byDefault, netstack tally
	for _, t := range targets {
		own, both := t.promoted()
		if !both {
			own = t
		}
		v := own.judge(runs)
		judged := []verdict{v}
		fmt.Fprintf(&rows, "| %s | %s | %s | %s |", t.title, t.demand(), own.measured(v), byDefault.add(v))
		if both {
			v := t.judge(runs)
			judged = append(judged, v)
			fmt.Fprintf(&rows, " %s | %s |", t.measured(v), netstack.add(v))
		} else {
			rows.WriteString(" | |")
		}
		fmt.Fprintf(&rows, "%s |\n", links(judged))
	}
	if byDefault.met+byDefault.missed+netstack.met+netstack.missed > 0 {
		fmt.Fprintf(w, "\n## Targets\n\nDefault: %s; with `tcp: netstack`: %s. Of culvert over a tap, each by the last run that has its figures. "+
			"In tables and pictures the default, promoted flows, is culvert-tap-promoted, and culvert-tap is `tcp: netstack`.\n", &byDefault, &netstack)
		fmt.Fprintf(w, "\n| | target | default | | `tcp: netstack` | | run |\n|---|---|---|---|---|---|---|\n%s", rows.String())
	}
	for _, r := range runs {
		if r.notes != "" {
			fmt.Fprintf(w, "\n### Notes on run %s\n\n%s\n", r.name, r.notes)
		}
	}
}

// links leads to the parts of the runs that verdicts are of, a space before each.
func links(judged []verdict) string {
	var out []string
	for _, v := range judged {
		if v.run == nil {
			continue
		}
		if link := fmt.Sprintf(" [%s](#run-%s)", v.run.name, strings.ToLower(v.run.name)); !slices.Contains(out, link) {
			out = append(out, link)
		}
	}
	return strings.Join(out, ",")
}
