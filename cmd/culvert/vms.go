package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newVMs() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "vms",
		Short: "List the VMs: how they are attached, their state, counters",
		Long: `Lists the VMs.

  waiting   nothing is attached yet
  ready     attached, and the node answers through the datapath
  stalled   attached, and the node does not answer
  paused    its VMM paused it; its ports stay open
  gone      it was there and left; its ports are closed until it returns

With -w a terminal shows the list as it is, and the bytes of the last second. Elsewhere it is
printed once, and then each VM that has changed.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c := client(cmd)
			defer c.Close()
			if follow {
				return watch(cmd, c, machines, c.VMs)
			}
			vms, err := c.VMs(cmd.Context())
			if err != nil {
				return err
			}
			return printList(cmd, vms, vmTable)
		},
	}
	cmd.Flags().BoolVarP(&follow, "watch", "w", false, "follow what changes")
	addOutput(cmd)
	return cmd
}

// machines is how VMs are followed.
var machines = kind[api.VM]{
	table: vmTable,
	name:  func(v api.VM) string { return v.Name },
	same: func(a, b api.VM) bool {
		return a.State == b.State && vmDetail(a) == vmDetail(b) && a.Generation == b.Generation
	},
	gone: func(v api.VM) api.VM {
		v.State, v.Detail = "removed", "" // gone is a VM that is followed still
		return v
	},
	bytes: func(v api.VM) api.Traffic { return v.Bytes },
}

func vmTable(vms []api.VM) *table {
	t := &table{head: []string{"VM", "STATE", "ATTACH", "NODE", "GEN", "OFFLOADS", "RTT", "FLOWS", "TO GUEST", "TO HOST", "DROPS", "DETAIL"}, state: 1}
	for _, v := range vms {
		offloads := strings.Join(v.Offloads, ",")
		if offloads == "" {
			offloads = "-"
		}
		rtt, drops := "-", "-"
		if v.Probe.RTT > 0 {
			rtt = time.Duration(v.Probe.RTT * float64(time.Second)).Round(time.Microsecond).String()
		}
		if len(v.Drops) > 0 {
			drops = reasons(v.Drops)
		}
		t.rows = append(t.rows, []string{
			v.Name, v.State, v.Attach, v.Node, fmt.Sprint(v.Generation), offloads, rtt, fmt.Sprint(v.Flows),
			bytesText(v.Bytes.ToGuest), bytesText(v.Bytes.ToHost), drops, vmDetail(v),
		})
	}
	return t
}

// vmDetail is why a VM is not ready, why its containers are not followed, and why
// its VMM cannot be asked.
func vmDetail(v api.VM) string {
	var parts []string
	for _, part := range []string{v.Detail, v.Engine.Detail, vmmLost(v)} {
		if part != "" {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "; ")
}

// vmmLost is why v's VMM cannot be asked, so that its pauses and resets go
// unnoticed.
func vmmLost(v api.VM) string {
	why, lost := strings.CutPrefix(v.VMM, "lost (")
	if !lost {
		return ""
	}
	return strings.TrimSuffix(why, ")")
}
