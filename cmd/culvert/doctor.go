package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newDoctor() *cobra.Command {
	var vm string
	cmd := &cobra.Command{
		Use:   "doctor [PORT|CONTAINER|SERVICE]",
		Short: "Walk from a host port to the guest's server and name the step that is broken",
		Long: `Walks the way of a client, host socket, listener, VM, link, node, guest port, container
or Service, and looks at each step now. What is broken comes with what to do.

  ok        looked at, and well
  broken    to be put right; the exit code is 1
  skipped   not looked at, or shut, because of another step
  unknown   looked at, and it cannot be told: a UDP server need not answer

PORT is a host port, 8080, 8080/udp or 127.0.0.1:8080; a container, a Service or a publish
is called as for ls. Without one it looks at every VM and every port, but shows of those
that are well only that. It makes real connections to guest ports, 32 at most, which carry
nothing, and takes ten seconds at the longest.`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			jsonWanted, err := asJSON(cmd)
			if err != nil {
				return err
			}
			of := ""
			if len(args) > 0 {
				of = args[0]
			}
			c := client(cmd)
			defer c.Close()
			steps, err := c.Doctor(cmd.Context(), vm, of)
			if err != nil {
				return err
			}
			if jsonWanted {
				err = writeJSON(cmd.OutOrStdout(), steps)
			} else {
				err = writeSteps(cmd.OutOrStdout(), steps)
			}
			if err != nil {
				return err
			}
			return brokenSteps(steps)
		},
	}
	cmd.Flags().StringVar(&vm, "vm", "", "only this VM and its ports, by `NAME`")
	addOutput(cmd)
	return cmd
}

// brokenSteps is the error that says which steps are.
func brokenSteps(steps []api.Step) error {
	var names []string
	for _, s := range steps {
		if s.State == "broken" {
			names = append(names, printable(stepPlace(s)+": "+s.Step))
		}
	}
	const most = 3
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("%d more", len(names)-most))
	}
	if names == nil {
		return nil
	}
	return &failedError{"broken: " + strings.Join(names, ", ")}
}

// stepPlace is the row or the VM a step belongs to.
func stepPlace(s api.Step) string {
	if s.Row != "" {
		return s.Row
	}
	if s.VM != "" {
		return "VM " + s.VM
	}
	return "-"
}

// writeSteps writes steps as a table, and below a broken one what to do. Nothing is
// cut off at a terminal's edge, as it is to be read: it goes on below.
func writeSteps(w io.Writer, steps []api.Step) error {
	width, terminal := terminalWidth(w)
	_, err := io.WriteString(w, stepsText(steps, width, terminal && os.Getenv("NO_COLOR") == ""))
	return err
}

// leastDetail is how many columns a detail has at least, however narrow the
// terminal: the terminal breaks such lines, but words stay whole.
const leastDetail = 24

// stepsText returns the lines of writeSteps, for a terminal of width columns; 0 is
// for no limit.
func stepsText(steps []api.Step, width int, colour bool) string {
	t := &table{head: []string{"WHERE", "STEP", "STATE", "DETAIL"}, state: 2}
	before := ""
	for _, s := range steps {
		place := stepPlace(s)
		if place == before {
			place = ""
		} else {
			before = place
		}
		t.rows = append(t.rows, []string{place, s.Step, s.State, ""})
	}
	t.text(0, false) // for the widths, and so for how much of a detail fits
	indent := strings.Repeat(" ", t.widths[0]+len(gap)+t.widths[1]+len(gap)+t.widths[2]+len(gap))
	room := 0
	if width > 0 {
		room = max(width-len(indent), leastDetail)
	}
	below := make([]string, len(steps))
	for i, s := range steps {
		detail := wrap(printable(s.Detail), room)
		t.rows[i][3] = detail[0]
		for _, line := range detail[1:] {
			below[i] += indent + line + "\n"
		}
		if s.State != "broken" || s.Advice == "" {
			continue
		}
		mark := "→ "
		for _, line := range wrap(printable(s.Advice), max(room-2, 0)) {
			below[i] += indent + mark + line + "\n"
			mark = "  "
		}
	}
	var out strings.Builder
	for n, line := range strings.SplitAfter(t.text(0, colour), "\n") {
		out.WriteString(line)
		if n > 0 && n <= len(steps) {
			out.WriteString(below[n-1])
		}
	}
	return out.String()
}

// wrap breaks s between words into lines of width columns at most, at least one
// line; a longer word has a line of its own. Width 0 is for no limit.
func wrap(s string, width int) []string {
	if width <= 0 || utf8.RuneCountInString(s) <= width {
		return []string{s}
	}
	var lines []string
	line := ""
	for _, word := range strings.Fields(s) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	return append(lines, line)
}
