package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newFlows() *cobra.Command {
	var vm string
	var follow bool
	cmd := &cobra.Command{
		Use:   "flows",
		Short: "List live flows with both ends' addresses, age and bytes",
		Long: `Lists live flows: who talks to which guest port, since when, and how much.

With -w a terminal shows the list as it is, and the bytes of the last second. Elsewhere
it is printed once, and then each flow that has begun, changed its state or ended ("gone").
It is looked every second: a flow that lives for less may go unseen. With -o json each
flow is a document of its own then, on one line.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := client(cmd)
			defer c.Close()
			list := func(ctx context.Context) ([]api.Flow, error) {
				all, err := c.Flows(ctx)
				return slices.DeleteFunc(all, func(f api.Flow) bool { return vm != "" && f.VM != vm }), err
			}
			if follow {
				return watch(cmd, c, liveFlows, list)
			}
			flows, err := list(cmd.Context())
			if err != nil {
				return err
			}
			return printList(cmd, flows, flowTable)
		},
	}
	cmd.Flags().BoolVarP(&follow, "watch", "w", false, "follow what changes")
	cmd.Flags().StringVar(&vm, "vm", "", "only flows of this VM, by `NAME`")
	addOutput(cmd)
	return cmd
}

// liveFlows is how flows are followed.
var liveFlows = kind[api.Flow]{
	table: flowTable,
	name:  func(f api.Flow) string { return fmt.Sprint(f.ID) },
	same:  func(a, b api.Flow) bool { return a.State == b.State },
	gone: func(f api.Flow) api.Flow {
		f.State = "gone"
		return f
	},
	bytes:  func(f api.Flow) api.Traffic { return f.Bytes },
	silent: true,
}

func flowTable(flows []api.Flow) *table {
	t := &table{head: []string{"PROTO", "CLIENT", "HOST", "SOURCE", "GUEST", "VM", "STATE", "AGE", "IDLE", "TO GUEST", "TO HOST", "OWNER"}, state: 6}
	for _, f := range flows {
		t.rows = append(t.rows, []string{
			f.Protocol, f.Client, f.Host, f.Source, f.Guest, f.VM, f.State, secondsText(f.Age), secondsText(f.Idle),
			bytesText(f.Bytes.ToGuest), bytesText(f.Bytes.ToHost), f.Owner.Kind + " " + f.Owner.ID,
		})
	}
	return t
}
