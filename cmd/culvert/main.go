// Command culvert makes the ports of a VM appear on the host. One binary is both
// the daemon (`culvert daemon`) and what people type at it; those commands reach
// the daemon by its API alone.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitFailed   = 1 // the request failed
	exitUsage    = 2 // wrong usage
	exitNoDaemon = 3 // no daemon at the socket
)

func main() {
	// The first signal asks what runs to end, the second to hurry; the third
	// ends the process as it is.
	signals := make(chan os.Signal, 3)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	ctx, end := context.WithCancel(context.Background())
	hurry := make(chan struct{})
	go func() {
		<-signals
		end()
		<-signals
		close(hurry)
		<-signals
		os.Exit(exitFailed)
	}()
	os.Exit(run(ctx, hurry, os.Args[1:], os.Stdout, os.Stderr))
}

// run runs the command line args until ctx ends, with hurry once hurry is
// closed, and returns the exit code.
func run(ctx context.Context, hurry <-chan struct{}, args []string, stdout, stderr io.Writer) int {
	root := newRoot(hurry, stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		err = &failedError{"interrupted"}
	}
	fmt.Fprintf(stderr, "culvert: %v\n", err)
	return exitCode(err)
}

// exitCode returns the exit code that says what err says.
func exitCode(err error) int {
	var noDaemon *api.NoDaemonError
	var noFlight *noFlightError
	var usage *usageError
	switch {
	case errors.As(err, &noDaemon), errors.As(err, &noFlight):
		return exitNoDaemon
	case errors.As(err, &usage):
		return exitUsage
	}
	return exitFailed
}

// A usageError is a command line that cannot be meant.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// A failedError is a request that failed, as a sentence.
type failedError struct{ text string }

func (e *failedError) Error() string { return e.text }

// newRoot returns the whole command.
func newRoot(hurry <-chan struct{}, stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "culvert",
		Short: "Makes the ports of a VM appear on the host",
		Long: `culvert makes the ports of a virtual machine appear on the machine that runs it.

Start the daemon, tell it how to reach the VM's network card, and publish ports:

  culvert daemon --attach default=qemu:unix:/tmp/vm.sock -p 8080:80
  culvert wait && curl http://localhost:8080/
  culvert ls

Exit codes: 0 fine, 1 the request failed, 2 wrong usage, 3 no daemon.`,
		Version:       versionText(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          usageArgs(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("culvert {{.Version}}\n")
	root.PersistentFlags().String("api", defaultSocket(), "the daemon's `SOCKET`; CULVERT_API says the same")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{fmt.Errorf("%w; see `%s --help`", err, cmd.CommandPath())}
	})
	root.AddCommand(
		newDaemon(hurry), newWait(), newPublish(), newUnpublish(), newLs(), newFlows(), newVMs(), newNames(), newKubernetes(), newTrace(), newDoctor(), newDemo(), newVersion(),
	)
	root.SetOut(stdout)
	root.SetErr(stderr)
	// The library would answer a shell it does not know with help and success.
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Args = cobra.ArbitraryArgs
			cmd.RunE = func(_ *cobra.Command, args []string) error {
				return &usageError{fmt.Errorf("shell %q is none of bash, fish, powershell, zsh", strings.Join(args, " "))}
			}
		}
	}
	return root
}

// usageArgs makes a check of arguments one of usage.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &usageError{fmt.Errorf("%w; see `%s --help`", err, cmd.CommandPath())}
		}
		return nil
	}
}

// noArgs is the check of a command without arguments. instead says where what
// people are likely to have meant goes; it may be empty.
func noArgs(instead string) cobra.PositionalArgs {
	return usageArgs(func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		if instead != "" {
			return fmt.Errorf("%s takes no arguments, and %q is one: %s", cmd.CommandPath(), args[0], instead)
		}
		return fmt.Errorf("%s takes no arguments, and %q is one", cmd.CommandPath(), args[0])
	})
}

// defaultSocket is where the daemon's API is when nobody says otherwise.
func defaultSocket() string {
	if s := os.Getenv("CULVERT_API"); s != "" {
		return s
	}
	if os.Geteuid() == 0 {
		return "/run/culvert/culvert.sock"
	}
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		// Its place where nobody has set it, as under su(1). Never a shared
		// directory, where another user could be first.
		dir = fmt.Sprintf("/run/user/%d", os.Geteuid())
	}
	return filepath.Join(dir, "culvert", "culvert.sock")
}

// client returns a client of the daemon that cmd means.
func client(cmd *cobra.Command) *api.Client {
	socket, _ := cmd.Flags().GetString("api") // root has it
	return api.NewClient(socket)
}
