package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
)

// How a run becomes tables. A family's results differ in subject, params and
// unit. Rows are subjects, ten paths say. The last param makes columns, as the
// number of flows does, and what is before it makes tables, as the direction
// does. The units are columns too while the table stays narrow enough to read,
// and tables of their own otherwise.

// maxColumns is what fits on a page: a cell has some 25 characters.
const maxColumns = 6

// baselines are the subjects that the others of a table are compared with: the
// first of these that it has.
var baselines = []string{"path=loopback", "path=qemu-user", "trace=none"}

// references are those that culvert's paths are compared with besides, in rows of
// ratios below a table.
var references = []string{"path=pasta-tap", "path=gvproxy", "path=culvert-stream"}

// write writes the run's part of the report.
func (r *run) write(w io.Writer) {
	fmt.Fprintf(w, "\n## Run %s\n\nrounds: %d", r.name, r.rounds)
	for _, line := range r.config {
		fmt.Fprintf(w, " · %s", line)
	}
	fmt.Fprintln(w)
	if len(r.absent) > 0 {
		fmt.Fprint(w, "\nMissing below:\n\n")
		for _, a := range r.absent {
			fmt.Fprintf(w, "- %s (%d×): %s\n", a.name, a.rounds, short(a.why))
		}
	}
	if len(r.again) > 0 {
		fmt.Fprint(w, "\nFailed and tried again, as only a peer is:\n\n")
		for _, a := range r.again {
			fmt.Fprintf(w, "- %s (%d×, in %d of %d rounds): %s\n", a.name, a.times, a.rounds, r.rounds, short(a.why))
		}
	}
	for _, family := range distinct(r.order, func(k result) string { return k.family }) {
		ofFamily := filter(r.order, func(k result) bool { return k.family == family })
		for _, shared := range natural(distinct(ofFamily, result.shared)) {
			keys := filter(ofFamily, func(k result) bool { return k.shared() == shared })
			title := strings.TrimSpace(family + " " + shared)
			if len(columnsOf(keys)) <= maxColumns {
				r.writeTable(w, title, keys)
				continue
			}
			for _, unit := range distinct(keys, unitOf) {
				r.writeTable(w, title, filter(keys, func(k result) bool { return k.unit == unit }))
			}
		}
	}
}

// shared is all params but the last, own is that.
func (k result) shared() string {
	return strings.TrimSuffix(strings.TrimSuffix(k.params, k.own()), " ")
}
func (k result) own() string { return k.params[strings.LastIndexByte(k.params, ' ')+1:] }

func unitOf(k result) string { return k.unit }

// columnsOf returns the columns for keys: results without a subject.
func columnsOf(keys []result) []result {
	var columns []result
	for _, unit := range distinct(keys, unitOf) {
		ofUnit := filter(keys, func(k result) bool { return k.unit == unit })
		for _, params := range natural(distinct(ofUnit, func(k result) string { return k.params })) {
			columns = append(columns, result{keys[0].family, "", params, unit})
		}
	}
	return columns
}

// writeTable writes one table of the results of keys.
func (r *run) writeTable(w io.Writer, title string, keys []result) {
	columns := columnsOf(keys)
	subjects := distinct(keys, func(k result) string { return k.subject })
	heads := make([]string, len(columns))
	for i, c := range columns {
		heads[i] = strings.TrimSpace(c.own() + " " + c.unit)
	}
	if units := distinct(keys, unitOf); len(units) == 1 && columns[0].params != "" {
		title += ", " + units[0]
		for i, c := range columns {
			heads[i] = c.own()
		}
	}
	fmt.Fprintf(w, "\n### %s\n\n| | %s |", title, strings.Join(heads, " | "))
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---|", len(columns)))
	for _, subject := range subjects {
		fmt.Fprintf(w, "| %s |", emphasized(name(subject)))
		for _, c := range columns {
			fmt.Fprintf(w, " %s |", r.cell(c.of(subject), subjects))
		}
		fmt.Fprintln(w)
	}
	for _, ours := range subjects {
		for _, theirs := range references {
			if ours == theirs || !isOurs(name(ours)) || !slices.Contains(subjects, theirs) {
				continue
			}
			fmt.Fprintf(w, "| *%s ÷ %s* |", name(ours), name(theirs))
			for _, c := range columns {
				fmt.Fprintf(w, " %s |", orDash(r.ratio(c.of(ours), c.of(theirs))))
			}
			fmt.Fprintln(w)
		}
	}
}

// isOurs says that a path of that name leads through culvert.
func isOurs(name string) bool { return strings.HasPrefix(name, "culvert") }

func emphasized(name string) string {
	if isOurs(name) {
		return "**" + name + "**"
	}
	return name
}

// cell shows one result, and its ratio to the table's baseline.
func (r *run) cell(k result, subjects []string) string {
	v, ok := r.values[k]
	if !ok {
		return orDash("")
	}
	s := v.String()
	if len(v) != r.rounds {
		s += fmt.Sprintf(" of %d rounds", len(v))
	}
	i := slices.IndexFunc(baselines, func(base string) bool { return slices.Contains(subjects, base) })
	if i < 0 || k.subject == baselines[i] {
		return s
	}
	return strings.TrimSpace(s + " " + r.ratio(k, k.of(baselines[i])))
}

// ratio shows that of two medians; it is empty where there is none, or where they
// are proportions already.
func (r *run) ratio(a, b result) string {
	if strings.HasSuffix(a.unit, "%") || strings.HasPrefix(a.unit, "times-") {
		return ""
	}
	ma, okA := r.median(a)
	mb, okB := r.median(b)
	if !okA || !okB || mb == 0 {
		return ""
	}
	return "×" + number(ma/mb)
}

// of returns the same result of another subject.
func (k result) of(subject string) result {
	k.subject = subject
	return k
}

// name returns a subject as a reader knows it.
func name(subject string) string {
	for _, key := range subjectKeys {
		subject = strings.TrimPrefix(subject, key)
	}
	return subject
}

// short cuts a reason off where nobody reads on.
func short(why string) string {
	const enough = 200
	if r := []rune(why); len(r) > enough {
		return string(r[:enough]) + "…"
	}
	return why
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

// distinct returns the different values of key, in the order seen.
func distinct[T any](list []T, key func(T) string) []string {
	var out []string
	seen := make(map[string]bool)
	for _, v := range list {
		if k := key(v); !seen[k] {
			seen[k] = true
			out = append(out, k)
		}
	}
	return out
}

// filter returns what of list is wanted.
func filter(list []result, wanted func(result) bool) []result {
	return slices.DeleteFunc(slices.Clone(list), func(k result) bool { return !wanted(k) })
}

// natural sorts names in place: as seen, but those that differ in a number at
// their end by its worth.
func natural(names []string) []string {
	stem := func(name string) string { return strings.TrimRight(name, "0123456789") }
	stems := distinct(names, stem)
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(slices.Index(stems, stem(a))-slices.Index(stems, stem(b)), len(a)-len(b), strings.Compare(a, b))
	})
	return names
}
