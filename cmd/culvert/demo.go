package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/cmd/internal/daemon"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/memory"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/culvertnet/culvert/stack/netstack"
	"github.com/spf13/cobra"
)

func newDemo() *cobra.Command {
	return &cobra.Command{
		Use:   "demo",
		Short: "Show it at work without root and without a VM",
		Long: `Runs a daemon and a guest in this process: the guest is a TCP/IP stack of its own
with a web server. Its port is published on a free loopback port, fetched, and
shown as ls shows it. Nothing is left behind.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 30*time.Second)
			defer cancel()
			return demo(ctx, cmd)
		},
	}
}

const demoPage = "Hello from a guest that no socket of the host's kernel reaches.\n"

func demo(ctx context.Context, cmd *cobra.Command) error {
	dir, err := os.MkdirTemp("", "culvert-demo")
	if err != nil {
		return fmt.Errorf("make demo folder: %w", err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "api.sock")
	config, err := daemon.ParseConfig("demo", nil, daemon.Overrides{APISocket: socket, Attach: []string{"demo=memory"}})
	if err != nil {
		return err
	}

	// The two ends of the guest's network card.
	offloads := virtio.OffloadCSum | virtio.OffloadTSO4
	ours, theirs := memory.Pair(memory.Options{ToGuest: offloads, FromGuest: offloads})
	defer ours.Close() // the daemon's, once it took it
	guest, err := demoGuest(theirs)
	if err != nil {
		return err
	}
	defer guest.Close()

	given := make(chan datapath.Attachment, 1)
	given <- ours
	started, ended := make(chan struct{}), make(chan error, 1)
	daemonCtx, stop := context.WithCancel(ctx)
	go func() {
		ended <- daemon.Run(daemonCtx, config, daemon.Options{
			Log:     slog.New(slog.DiscardHandler),
			Started: func() { close(started) },
			Memory: func(ctx context.Context) (datapath.Attachment, error) {
				select {
				case att := <-given:
					return att, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			},
		})
	}()
	err = func() error {
		select {
		case <-started:
		case err := <-ended:
			ended <- nil
			return err
		}
		c := api.NewClient(socket)
		defer c.Close()
		return demoUse(ctx, cmd, c)
	}()
	stop()
	if endErr := <-ended; err == nil {
		err = endErr
	}
	return err
}

// A guest is a stack at a VM's end of the link, with a web server.
type guest struct {
	stack  *netstack.Stack
	server http.Server
	served chan struct{} // closed when server has ended
}

// demoGuest starts a guest on att, which it owns from then on.
func demoGuest(att datapath.Attachment) (*guest, error) {
	s, err := netstack.New(att, netstack.Options{
		Node: netip.MustParseAddr("10.0.2.1"), Gateway: netip.MustParsePrefix("10.0.2.2/24"), MTU: 1500, Seed: "demo guest",
	})
	if err != nil {
		return nil, fmt.Errorf("start demo guest: %w", err)
	}
	l, err := s.ListenTCP(80)
	if err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("start demo guest: %w", err)
	}
	g := &guest{stack: s, served: make(chan struct{})}
	g.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, demoPage) })
	go func() {
		defer close(g.served)
		_ = g.server.Serve(l) // until Close
	}()
	return g, nil
}

// Close switches the guest off, in the middle of whatever it does.
func (g *guest) Close() error {
	err := g.stack.Close()
	_ = g.server.Close()
	<-g.served
	return err
}

// demoUse does what a user would: wait, publish, fetch, list.
func demoUse(ctx context.Context, cmd *cobra.Command, c *api.Client) error {
	out := cmd.OutOrStdout()
	if err := wait(ctx, c, "demo", "ready", 10*time.Second); err != nil {
		return err
	}
	rows, err := c.Publish(ctx, api.PublishRequest{Publish: []string{"0:80"}})
	if err != nil {
		return err
	}
	if rows[0].State != "forwarded" {
		return &failedError{"publish 0:80: " + rows[0].Detail}
	}
	url := "http://" + rows[0].Bound[0] + "/"
	fmt.Fprintf(out, "$ culvert publish 0:80\n$ curl %s\n", url)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true} // never through a proxy
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("fetch %s: %w", url, err)
	}
	page, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		return fmt.Errorf("fetch %s: %w", url, err)
	}
	if string(page) != demoPage {
		return &failedError{fmt.Sprintf("fetched %q, and not the guest's page", page)}
	}
	fmt.Fprintf(out, "%s$ culvert ls\n", page)
	rows, err = c.Listeners(ctx, "")
	if err != nil {
		return err
	}
	return listenerTable(rows).write(out)
}
