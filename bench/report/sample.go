package main

import (
	"slices"
	"strconv"
	"strings"
)

// A sample is one result's values, at least one: a round each.
type sample []float64

func (s sample) median() float64 {
	v := slices.Sorted(slices.Values(s))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// String is the median and, unless all are alike, the spread.
func (s sample) String() string {
	least, greatest := slices.Min(s), slices.Max(s)
	if least == greatest {
		return number(least)
	}
	return number(s.median()) + " (" + number(least) + " to " + number(greatest) + ")"
}

// number shows v with three digits, which is more than rounds agree on.
func number(v float64) string { return rounded(v, 3) }

// rounded shows v with so many digits, or all before the point where it has more.
func rounded(v float64, digits int) string {
	s := strconv.FormatFloat(v, 'g', digits, 64)
	if strings.Contains(s, "e+") {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return s
}
