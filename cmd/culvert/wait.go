package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

func newWait() *cobra.Command {
	var vm, state string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "wait",
		Short: "Wait until a VM is ready, or gone",
		Long: `Returns when the VM is in the state asked for; fails at the time-out, saying what
it waits for. "gone" is met too while nothing is attached yet. Without a daemon it
fails at once, with exit code 3.`,
		Args: noArgs("a VM goes behind --vm"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if state != "ready" && state != "gone" {
				return &usageError{fmt.Errorf("state %q is neither ready nor gone", state)}
			}
			if timeout <= 0 {
				return &usageError{fmt.Errorf("--timeout %s: it is more than nothing, such as 1s", timeout)}
			}
			c := client(cmd)
			defer c.Close()
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return wait(ctx, c, vm, state, timeout)
		},
	}
	cmd.Flags().StringVar(&vm, "vm", "", "the VM's `NAME`; may be left out while there is one")
	cmd.Flags().StringVar(&state, "for", "ready", "`STATE` to wait for: ready or gone")
	cmd.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait")
	return cmd
}

// errMet ends a wait that is met.
var errMet = errors.New("state reached")

// wait follows the VM's events, and looks first once none can be missed.
func wait(ctx context.Context, c *api.Client, vm, state string, timeout time.Duration) error {
	var last string // what the VM was like, for the error
	look := func() error {
		v, err := findVM(ctx, c, vm)
		if state == "gone" && last != "" && errors.Is(err, errNoVM) {
			return errMet // it was there, and a reload has removed it
		}
		if err != nil {
			return err
		}
		vm = v.Name
		last = fmt.Sprintf("it is %s", v.State)
		if v.Detail != "" {
			last += ": " + v.Detail
		}
		if v.State == state || (state == "gone" && v.State == "waiting") {
			return errMet
		}
		return nil
	}
	err := c.Events(ctx, look, func(e api.Event) error {
		if e.VM != vm || e.Row != "" {
			return nil
		}
		return look()
	})
	switch {
	case errors.Is(err, errMet):
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		if last == "" {
			last = "the daemon did not answer"
		}
		if vm == "" {
			return &failedError{fmt.Sprintf("no VM is %s after %s; %s", state, timeout, last)}
		}
		return &failedError{fmt.Sprintf("VM %s is not %s after %s; %s", vm, state, timeout, last)}
	case err != nil:
		return err
	}
	return &failedError{fmt.Sprintf("the daemon has ended while VM %s was waited for", vm)}
}

// errNoVM says that the daemon has no VM of that name.
var errNoVM = errors.New("there is no VM named")

// findVM returns the VM of that name, or the only one.
func findVM(ctx context.Context, c *api.Client, name string) (api.VM, error) {
	vms, err := c.VMs(ctx)
	if err != nil {
		return api.VM{}, err
	}
	for _, v := range vms {
		if v.Name == name || (name == "" && len(vms) == 1) {
			return v, nil
		}
	}
	if name == "" && len(vms) == 0 {
		return api.VM{}, &failedError{"there is no VM: the daemon's config or --attach names them"}
	}
	if name == "" {
		return api.VM{}, &usageError{fmt.Errorf("there are %d VMs: name one with --vm", len(vms))}
	}
	return api.VM{}, fmt.Errorf("%w %q", errNoVM, name)
}
