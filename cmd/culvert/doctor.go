package main

import (
	"fmt"
	"io"
	"os"
	"strings"

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
// cut off at a terminal's edge: it is to be read.
func writeSteps(w io.Writer, steps []api.Step) error {
	t := &table{head: []string{"WHERE", "STEP", "STATE", "DETAIL"}, state: 2}
	before := ""
	for _, s := range steps {
		place := stepPlace(s)
		if place == before {
			place = ""
		} else {
			before = place
		}
		t.rows = append(t.rows, []string{place, s.Step, s.State, s.Detail})
	}
	_, terminal := terminalWidth(w)
	text := strings.SplitAfter(t.text(0, terminal && os.Getenv("NO_COLOR") == ""), "\n")
	indent := strings.Repeat(" ", t.widths[0]+len(gap)+t.widths[1]+len(gap)+t.widths[2]+len(gap))
	var out strings.Builder
	for n, line := range text {
		out.WriteString(line)
		if n > 0 && n <= len(steps) && steps[n-1].State == "broken" && steps[n-1].Advice != "" {
			out.WriteString(indent + "→ " + printable(steps[n-1].Advice) + "\n")
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}
