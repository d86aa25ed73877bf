package main

import (
	"strings"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newNames() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "names",
		Short: "List the names of containers, who has each, and where it leads",
		Long: `Lists the names that the daemon's DNS server answers for, without the zone.

A name that several containers have leads to the newest of them, which stands first.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := client(cmd)
			defer c.Close()
			names, err := c.Names(cmd.Context())
			if err != nil {
				return err
			}
			return printList(cmd, names, nameTable)
		},
	}
	addOutput(cmd)
	return cmd
}

func nameTable(names []api.Name) *table {
	t := &table{head: []string{"NAME", "VM", "ADDRESSES", "OWNERS"}, state: -1}
	for _, n := range names {
		owners := make([]string, len(n.Owners))
		for i, o := range n.Owners {
			owners[i] = o.Kind + " " + shortID(o)
		}
		t.rows = append(t.rows, []string{n.Name, n.VM, strings.Join(n.Addresses, ", "), strings.Join(owners, ", ")})
	}
	return t
}

// shortIDLen is how much of a container's ID docker shows.
const shortIDLen = 12

// shortID is an owner's id as people know it.
func shortID(o api.Owner) string {
	if o.Kind == "docker" && len(o.ID) > shortIDLen {
		return o.ID[:shortIDLen]
	}
	return o.ID
}
