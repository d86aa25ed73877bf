package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newKubernetes() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "kubernetes",
		Aliases: []string{"k8s"},
		Short:   "The ports of Services of type LoadBalancer in a VM's cluster",
		Args:    usageArgs(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newKubernetesStatus(),
		newKubernetesWant("start", "Forward the cluster's ports again", true),
		newKubernetesWant("stop", "Close every port of the cluster; they are closed when it returns", false))
	return cmd
}

func newKubernetesStatus() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Whether the cluster answers, and what became of each LoadBalancer port",
		Long: `Says of each VM with a cluster whether its API answers or why not, and of each port
of its Services of type LoadBalancer

  forwarded on IP:PORT          open on the host, led to the guest
  pending (WHY)                 it waits for something in the cluster or the VM
  not forwarded (WHY)           not possible, or another publish has the port
  bind failed, retrying (WHY)   the host refused the port; tried again

An API that does not answer changes no port.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			jsonWanted, err := asJSON(cmd)
			if err != nil {
				return err
			}
			c := client(cmd)
			defer c.Close()
			clusters, err := c.Kubernetes(cmd.Context())
			switch {
			case err != nil:
				return err
			case len(clusters) == 0:
				return &failedError{"no VM has kubernetes in its config"}
			case jsonWanted:
				return writeJSON(cmd.OutOrStdout(), clusters)
			}
			return writeClusters(cmd.OutOrStdout(), clusters)
		},
	}
	addOutput(cmd)
	return cmd
}

func newKubernetesWant(use, short string, wanted bool) *cobra.Command {
	var vm string
	cmd := &cobra.Command{
		Use:   use + " [--vm NAME]",
		Short: short,
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := client(cmd)
			defer c.Close()
			_, err := c.WantKubernetes(cmd.Context(), api.KubernetesRequest{VM: vm, Wanted: wanted})
			return err
		},
	}
	cmd.Flags().StringVar(&vm, "vm", "", "the VM's `NAME`; may be left out while one VM has a cluster")
	return cmd
}

// A statusLine is a line of which the state, a phrase, has a colour.
type statusLine struct {
	subject, phrase, rest string
	state                 string // for colourOf
}

// writeClusters writes the status as fits w, as a table does.
func writeClusters(w io.Writer, clusters []api.Kubernetes) error {
	width, terminal := terminalWidth(w)
	if !terminal {
		width = 0
	}
	var out strings.Builder
	for _, l := range clusterLines(clusters) {
		out.WriteString(l.text(width, terminal && os.Getenv("NO_COLOR") == ""))
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// text returns the line. One longer than width ends in "…"; width 0 is for no
// limit.
func (l statusLine) text(width int, colour bool) string {
	text := []rune(printable(l.subject + ": " + l.phrase + l.rest))
	start := len([]rune(l.subject)) + len(": ")
	end := start + len([]rune(l.phrase))
	if width > 0 && len(text) > width {
		text = append(text[:width-1], '…')
	}
	if !colour || end > len(text) {
		return string(text) + "\n"
	}
	return string(text[:start]) + colourOf(l.state) + string(text[start:end]) + "\x1b[0m" + string(text[end:]) + "\n"
}

// clusterLines says how it stands with the clusters (C-46).
func clusterLines(clusters []api.Kubernetes) []statusLine {
	var lines []statusLine
	for _, k := range clusters {
		l := statusLine{subject: "VM " + k.VM, phrase: "API reachable", state: "ready"}
		why := k.API.Detail
		if !k.API.Reachable {
			l.phrase, l.state = "API not reachable", "failed"
			if k.Failures > 1 {
				why += fmt.Sprintf("; %d failures in a row", k.Failures)
			}
		}
		l.rest = " at " + k.API.Endpoint
		if why != "" {
			l.rest += " (" + why + ")"
		}
		lines = append(lines, l)
		switch {
		case !k.Wanted:
			lines = append(lines, statusLine{subject: "VM " + k.VM, phrase: "stopped", rest: ", no port is forwarded; `culvert kubernetes start` undoes it", state: "stopped"})
		case k.API.Reachable && len(k.Ports) == 0:
			lines = append(lines, statusLine{subject: "VM " + k.VM, phrase: "no Service of type LoadBalancer", state: "none"})
		}
		for _, p := range k.Ports {
			lines = append(lines, portLine(p))
		}
	}
	return lines
}

// portLine says what became of a port.
func portLine(p api.ServicePort) statusLine {
	l := statusLine{subject: fmt.Sprintf("%s/%s %d/%s", p.Namespace, p.Name, p.Port, p.Protocol), state: p.State}
	switch {
	case p.State == "forwarded":
		l.phrase, l.rest = "forwarded", " on "+p.Host
	case p.State == "pending":
		l.phrase = "pending"
	case p.State == "failed" && !p.RetryAt.IsZero():
		l.phrase = "bind failed, retrying"
	default: // skipped, and a port that another publish has
		l.phrase = "not forwarded"
	}
	if p.Detail != "" {
		l.rest += " (" + p.Detail + ")"
	}
	return l
}
