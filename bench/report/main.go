// Command report writes BENCHMARKS.md from the raw output of `go test -bench`,
// and draws plots of it.
//
//	go run ./bench/report [-plots FOLDER] bench/results/RUN... > BENCHMARKS.md
//
// RUN is a folder with one file (*.txt) a round, all of one sitting on one machine,
// and perhaps a notes.md, which is taken in as it is: what profiling said of a
// target that is not met. Oldest first: a later run's figures stand for those of
// an earlier one. No figure of one run is compared with another's, and all of
// them come from the rounds.
//
// The report opens with the verdicts on the targets (targets.go), then come the
// plots (plots.go), then a part for each run with all that it measured.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

const preface = "# Benchmarks\n\nWritten by `bench/report` from the raw output in `bench/results`; `make bench` makes both anew.\n" +
	"A figure is the median (least to greatest) of the rounds of one sitting. " +
	"× is a ratio of medians of one run: in a row, to loopback, the kernel's without a relay, or else to the table's first row.\n"

func main() {
	plotsDir := flag.String("plots", "docs/bench", "folder of the plots, as BENCHMARKS.md links to it")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: report [-plots FOLDER] RUN-FOLDER...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	out := bufio.NewWriter(os.Stdout)
	err := report(out, *plotsDir, flag.Args())
	if err = errors.Join(err, out.Flush()); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

// report writes the report of the runs in dirs, and their plots to plotsDir.
func report(w io.Writer, plotsDir string, dirs []string) error {
	var runs []*run
	for _, dir := range dirs {
		r, err := readRun(dir)
		if err != nil {
			return err
		}
		runs = append(runs, r)
	}
	fmt.Fprint(w, preface)
	writeTargets(w, targets, runs)
	if err := writePlots(w, plotsDir, runs); err != nil {
		return err
	}
	for _, r := range runs {
		r.write(w)
	}
	return nil
}
