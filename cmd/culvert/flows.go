package main

import (
	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newFlows() *cobra.Command {
	var vm string
	cmd := &cobra.Command{
		Use:   "flows",
		Short: "List live flows with both ends' addresses, age and bytes",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := client(cmd)
			defer c.Close()
			all, err := c.Flows(cmd.Context())
			if err != nil {
				return err
			}
			var flows []api.Flow
			for _, f := range all {
				if vm == "" || f.VM == vm {
					flows = append(flows, f)
				}
			}
			return printList(cmd, flows, flowTable)
		},
	}
	cmd.Flags().StringVar(&vm, "vm", "", "only flows of this VM, by `NAME`")
	addOutput(cmd)
	return cmd
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
