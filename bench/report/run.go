package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A run is all rounds of one sitting.
type run struct {
	name   string
	rounds int
	config []string          // "key: value" lines, in the order seen
	absent []absence         // in the order seen
	again  []repeat          // in the order seen
	notes  string            // Markdown, written by hand
	order  []result          // the keys of values, in the order seen
	values map[result]sample // one a round
}

// An absence is a measurement that is missing in some rounds.
type absence struct {
	name, why string // why: of the first of them
	rounds    int
}

// A repeat is a measurement of a peer's that failed and was tried again, in some
// rounds.
type repeat struct {
	name, why     string // why: it failed in the first of them
	times, rounds int    // of all rounds together, and in how many
}

// A result is one metric of one benchmark. BenchmarkUDP/path=socat/size=64 has the
// family UDP, the subject path=socat and the params size=64; the subject is what
// a table has one row for.
type result struct{ family, subject, params, unit string }

// subjectKeys are those that name a subject. Where there are several the last of
// them does, and the others are params: traces are compared over the same path.
// Where there is none all params together do, and nothing is a param.
var subjectKeys = []string{"path=", "trace="}

// unloaded is a param that says what is so anyway: earlier runs had no others.
const unloaded = "load=idle"

// readRun reads the rounds of one folder, and its notes.
func readRun(dir string) (*run, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no rounds (*.txt) in %s", dir)
	}
	r := newRun(filepath.Base(dir), len(files))
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
	notes, err := os.ReadFile(filepath.Join(dir, "notes.md"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	r.notes = strings.TrimSpace(string(notes))
	return r, nil
}

func newRun(name string, rounds int) *run {
	return &run{name: name, rounds: rounds, values: make(map[result]sample)}
}

// read takes in one round.
func (r *run) read(in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), " ")
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--- FAIL: Benchmark"); ok {
			r.miss(withoutProcs(name), "failed")
		} else if text, ok := strings.CutPrefix(line, "left-out: Benchmark"); ok {
			name, why, _ := strings.Cut(text, ": ")
			r.miss(name, why)
		} else if text, ok := strings.CutPrefix(line, "tried-again: Benchmark"); ok {
			if err := r.readRepeat(text); err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
		} else if strings.HasPrefix(line, "Benchmark") {
			if err := r.readBenchmark(strings.Fields(line)); err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
		} else if key, _, ok := strings.Cut(line, ": "); ok && !strings.ContainsAny(key, " \t") && !slices.Contains(r.config, line) {
			r.config = append(r.config, line)
		}
	}
	return lines.Err()
}

// miss takes in that a measurement is missing in one more round.
func (r *run) miss(name, why string) {
	i := slices.IndexFunc(r.absent, func(a absence) bool { return a.name == name })
	if i < 0 {
		i = len(r.absent)
		r.absent = append(r.absent, absence{name: name, why: why})
	}
	r.absent[i].rounds++
}

// readRepeat takes in that a measurement was tried again: its name, how often, why.
func (r *run) readRepeat(text string) error {
	name, rest, _ := strings.Cut(text, ": ")
	times, why, _ := strings.Cut(rest, ": ")
	n, err := strconv.Atoi(times)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(r.again, func(a repeat) bool { return a.name == name })
	if i < 0 {
		i = len(r.again)
		r.again = append(r.again, repeat{name: name, why: why})
	}
	r.again[i].times += n
	r.again[i].rounds++
	return nil
}

// readBenchmark takes in one line: a name, the number of iterations, and pairs of
// value and unit.
func (r *run) readBenchmark(fields []string) error {
	if len(fields) < 4 {
		return nil // a name on a line of its own
	}
	key := parseName(fields[0])
	for i := 2; i+1 < len(fields); i += 2 {
		v, err := strconv.ParseFloat(fields[i], 64)
		if err != nil {
			return err
		}
		key.unit = fields[i+1]
		if key.unit == "ns/op" && v == 0 {
			continue // how a benchmark says that it means nothing
		}
		if r.values[key] == nil {
			r.order = append(r.order, key)
		}
		r.values[key] = append(r.values[key], v)
	}
	return nil
}

// parseName returns what a benchmark's name says: a result without unit.
func parseName(name string) result {
	parts := strings.Split(strings.TrimPrefix(withoutProcs(name), "Benchmark"), "/")
	res := result{family: parts[0]}
	params := slices.DeleteFunc(parts[1:], func(p string) bool { return p == unloaded })
	for _, key := range subjectKeys {
		if i := slices.IndexFunc(params, func(p string) bool { return strings.HasPrefix(p, key) }); i >= 0 {
			if res.subject != "" {
				params = slices.Insert(params, 0, res.subject)
				i++
			}
			res.subject = params[i]
			params = slices.Delete(params, i, i+1)
		}
	}
	res.params = strings.Join(params, " ")
	if res.subject == "" {
		res.subject, res.params = res.params, ""
	}
	return res
}

// withoutProcs cuts the number of processors off a benchmark's name, which is
// there unless it is 1.
func withoutProcs(name string) string {
	if i := strings.LastIndexByte(name, '-'); i > 0 {
		if _, err := strconv.ParseUint(name[i+1:], 10, 0); err == nil {
			return name[:i]
		}
	}
	return name
}

// median returns that of one result, and whether there is any.
func (r *run) median(res result) (float64, bool) {
	v, ok := r.values[res]
	if !ok {
		return 0, false
	}
	return v.median(), true
}
