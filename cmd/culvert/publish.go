package main

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/spf13/cobra"
)

const publishSyntax = `  [hostIP:]hostPort[-end]:[guestIP:]guestPort[-end][/tcp|/udp]

  8080:80                   the guest's port 80 at the host's port 8080
  127.0.0.1:8080:80/tcp     on one host address
  [::1]:5353:53/udp         IPv6 addresses are in brackets
  8080:10.0.2.7:80          an address behind the VM's node
  6000-6009:7000-7009       a range
  0:80                      the kernel picks the host port; the row shows it`

func newPublish() *cobra.Command {
	cmd := publishCommand("publish", "Publish ports of a VM on the host", (*api.Client).Publish)
	cmd.Long = "Publishes ports of a VM until they are unpublished or the daemon ends, and prints\ntheir rows. It fails if one of them did;\nsuch a row stays in `culvert ls`, is tried again where that can help, and leaves with\n`culvert unpublish`.\n\n" + publishSyntax
	return cmd
}

func newUnpublish() *cobra.Command {
	cmd := publishCommand("unpublish", "Take publishes back; their host ports are free when it returns",
		func(c *api.Client, ctx context.Context, r api.PublishRequest) ([]api.Listener, error) {
			rows, err := c.Unpublish(ctx, r)
			for i := range rows {
				rows[i].State, rows[i].Detail = "gone", ""
			}
			return rows, err
		})
	cmd.Long = "Takes back publishes of `culvert publish`: listeners are closed, their flows reset, and\nthe host ports free when it returns. What is not published is no error.\n\n" + publishSyntax
	return cmd
}

func publishCommand(use, short string, call func(*api.Client, context.Context, api.PublishRequest) ([]api.Listener, error)) *cobra.Command {
	var vm string
	cmd := &cobra.Command{
		Use:   use + " [--vm NAME] PUBLISH...",
		Short: short,
		Args:  usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, text := range args {
				if _, err := listener.ParseSpec(text); err != nil {
					return &usageError{err}
				}
			}
			if _, err := asJSON(cmd); err != nil {
				return err
			}
			c := client(cmd)
			defer c.Close()
			rows, err := call(c, cmd.Context(), api.PublishRequest{VM: vm, Publish: args})
			if err != nil {
				return err
			}
			if err := printList(cmd, rows, listenerTable); err != nil {
				return err
			}
			if len(rows) < len(args) && use == "unpublish" {
				fmt.Fprintf(cmd.ErrOrStderr(), "culvert: %d of %d were not published\n", len(args)-len(rows), len(args))
			}
			failed, again := 0, false
			for _, r := range rows {
				if r.State == "failed" || r.State == "skipped" {
					failed++
					again = again || r.State == "failed"
				}
			}
			if failed > 0 {
				text := fmt.Sprintf("%d of %d not published", failed, len(rows))
				if again {
					text += "; what failed stays wanted and is tried again, until `culvert unpublish`"
				}
				return &failedError{text}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&vm, "vm", "", "the VM's `NAME`; may be left out while there is one")
	addOutput(cmd)
	return cmd
}

// sortedKeys returns m's keys in order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
