package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/culvertnet/culvert/cmd/internal/daemon"
	"github.com/culvertnet/culvert/stack"
	"github.com/spf13/cobra"
)

// newDaemon returns the command; hurry is daemon.Options'.
func newDaemon(hurry <-chan struct{}) *cobra.Command {
	var file string
	var over daemon.Overrides
	cmd := &cobra.Command{
		Use:   "daemon",
		Short: "Run the data plane in the foreground",
		Long: `Runs the data plane in the foreground, and logs to standard error.

SIGTERM stops accepting, drains, resets what is left and leaves with 0; a second
one hurries it. SIGHUP reads the config again and applies the difference.
Under systemd it says READY=1 when it serves.`,
		Example: `  culvert daemon --attach default=qemu:unix:/tmp/vm.sock -p 8080:80
  culvert daemon --config /etc/culvert/culvert.yaml`,
		Args: noArgs("a config file goes behind --config, a publish behind -p"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			over.APISocket, _ = cmd.Flags().GetString("api")
			over.ForceAPI = cmd.Flags().Changed("api") || os.Getenv("CULVERT_API") != ""
			return runDaemon(cmd, file, over, hurry)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "config `FILE` (YAML)")
	cmd.Flags().StringArrayVar(&over.Attach, "attach", nil, "a VM and how to reach it, `VM=SPEC`; may be repeated")
	cmd.Flags().StringArrayVarP(&over.Publish, "publish", "p", nil, "`PUBLISH` for the only VM, as with culvert publish; may be repeated")
	return cmd
}

func runDaemon(cmd *cobra.Command, file string, over daemon.Overrides, hurry <-chan struct{}) error {
	stack.LimitProcs()
	load := func() (*daemon.Config, error) { return loadConfig(file, over) }
	config, err := load()
	if err != nil {
		return &usageError{err}
	}
	log := newLogger(cmd.ErrOrStderr(), config.Log)
	if err := daemon.RaiseDescriptors(); err != nil {
		log.Warn("limit of open files not raised", "err", err)
	}
	if len(config.VMs) == 0 {
		log.Warn("there is no VM: name one with --attach, or under vms in the config")
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	opts := daemon.Options{Log: log, Version: version + revision(), Hangup: hangup, Hurry: hurry}
	if file != "" {
		opts.Reload = load
	}
	return daemon.Run(cmd.Context(), config, opts)
}

// loadConfig reads the config file, if there is one, and the command line.
func loadConfig(file string, over daemon.Overrides) (*daemon.Config, error) {
	if file == "" {
		return daemon.ParseConfig("command line", nil, over)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	return daemon.ParseConfig(file, text, over)
}
