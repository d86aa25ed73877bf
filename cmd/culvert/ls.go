package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newLs() *cobra.Command {
	var owner, vm string
	var follow bool
	cmd := &cobra.Command{
		Use:   "ls [CONTAINER|SERVICE|PUBLISH]",
		Short: "List every requested host port, who asked for it, and what became of it",
		Long: `Lists the ledger: every requested host port, who asked for it, its state and why.

  pending     wanted, not yet possible; the detail says what is waited for
  forwarded   open on the host, led to the guest
  skipped     never possible, not tried again
  failed      not possible now; tried again, and at once when a row of ours leaves

With an argument only its rows are shown: those of a container, by its id, its
name or four or more characters that only its id begins with; of a Service, as
namespace/name; of a publish as it was asked for, or by its host port; or of what
stands under HOST.

With -w a terminal shows the list as it is at every moment, and the bytes of the last
second. Elsewhere it is printed
once, and then each row that has changed; one that has left is "gone". With -o json
each row is a document of its own then, on one line.`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if owner != "" && owner != "config" && owner != "cli" && owner != "docker" && owner != "kubernetes" {
				return &usageError{fmt.Errorf("owner kind %q is none of config, cli, docker, kubernetes", owner)}
			}
			if _, err := asJSON(cmd); err != nil {
				return err
			}
			c := client(cmd)
			defer c.Close()
			list := func(ctx context.Context) ([]api.Listener, error) {
				of := ""
				if len(args) > 0 {
					of = args[0]
				}
				all, err := c.Listeners(ctx, of)
				var unknown *api.Problem
				if follow && errors.As(err, &unknown) && unknown.Status == http.StatusNotFound {
					err = nil // it may come, and it may come back
				}
				var rows []api.Listener
				for _, l := range all {
					if (owner == "" || l.Owner.Kind == owner) && (vm == "" || l.VM == vm) {
						rows = append(rows, l)
					}
				}
				return rows, err
			}
			if follow {
				return watch(cmd, c, listeners, list)
			}
			rows, err := list(cmd.Context())
			if err != nil {
				return err
			}
			return printList(cmd, rows, listenerTable)
		},
	}
	cmd.Flags().StringVar(&owner, "owner", "", "only owners of this `KIND`: config, cli, docker, kubernetes")
	cmd.Flags().StringVar(&vm, "vm", "", "only rows of this VM, by `NAME`")
	cmd.Flags().BoolVarP(&follow, "watch", "w", false, "follow what changes")
	addOutput(cmd)
	return cmd
}

// listeners is how rows of the ledger are followed.
var listeners = kind[api.Listener]{
	table: listenerTable,
	name: func(r api.Listener) string {
		if r.Owner.Kind == "config" || r.Owner.Kind == "cli" { // one row each, whose port the kernel may pick anew
			return r.Owner.Kind + " " + r.Owner.ID
		}
		return fmt.Sprintf("%s %s %s %s/%s", r.Owner.Kind, r.Owner.ID, r.VM, r.Host, r.Protocol)
	},
	same: func(a, b api.Listener) bool {
		return a.State == b.State && a.Detail == b.Detail && a.Guest == b.Guest && slices.Equal(a.Bound, b.Bound)
	},
	gone: func(r api.Listener) api.Listener {
		r.State, r.Detail, r.Bound = "gone", "", []string{}
		return r
	},
	bytes: func(r api.Listener) api.Traffic { return r.Bytes },
}

func listenerTable(rows []api.Listener) *table {
	t := &table{head: []string{"HOST", "GUEST", "VM", "STATE", "OWNER", "FLOWS", "TO GUEST", "TO HOST", "DETAIL"}, state: 3}
	for _, r := range rows {
		detail := r.Detail
		if n := r.Flows.Refused; n > 0 {
			if detail != "" {
				detail += "; "
			}
			detail += fmt.Sprintf("%d refused (%s)", n, reasons(r.Flows.Refusals))
		}
		t.rows = append(t.rows, []string{
			r.Host + "/" + r.Protocol, r.Guest, r.VM, r.State, ownerText(r), fmt.Sprint(r.Flows.Active),
			bytesText(r.Bytes.ToGuest), bytesText(r.Bytes.ToHost), detail,
		})
	}
	return t
}

// reasons lists counted reasons, in a fixed order.
func reasons(m map[string]uint64) string {
	var parts []string
	for _, k := range sortedKeys(m) {
		parts = append(parts, fmt.Sprintf("%s %d", k, m[k]))
	}
	return strings.Join(parts, ", ")
}

// ownerText is who asked for a row. What people typed is in the row anyway.
func ownerText(r api.Listener) string {
	switch {
	case r.Owner.Kind == "docker" && r.Name != "":
		return "docker " + r.Name
	case r.Owner.Kind == "docker" || r.Owner.Kind == "kubernetes":
		return r.Owner.Kind + " " + shortID(r.Owner)
	}
	return r.Owner.Kind
}
