package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/culvertnet/culvert/stack/relay"
)

// walkHost walks from the host's socket to the listener, and says whether the way
// into the guest is worth a try: not where nothing may listen there yet.
func (d *Daemon) walkHost(w *walk, r subject, c *checkup) (open bool) {
	asked := fmt.Sprintf("%s asks for it, and it leads to %s", who(r), r.Guest)
	switch {
	case r.State == listener.Forwarded.String():
		walkSockets(w, r)
		w.ok(atListener, "%s", asked)
		return true
	case r.State == listener.Pending.String():
		w.skip(atSocket, "closed while the listener is pending")
		if c.reached && c.state == reconcile.VMReady && r.Owner.Kind != listener.KindDocker && r.Owner.Kind != listener.KindKubernetes {
			w.broken(atListener, sentence("pending", r.Detail), "ask again in a moment: its VM is ready")
			return false
		}
		w.skip(atListener, "%s", sentence("pending", r.Detail))
		return false
	case r.State == listener.Failed.String() && r.cause != nil && !errors.Is(r.cause, listener.ErrConflict):
		w.broken(atSocket, r.Detail, bindAdvice(r))
		w.skip(atListener, "%s; it is not open", asked)
		return true
	}
	advice := "publish it otherwise; this is not tried again"
	switch {
	case errors.Is(r.cause, listener.ErrConflict):
		advice = "take the other one back, or publish this one on another host port; it takes over when the other leaves"
	case r.State == listener.Failed.String():
		advice = "change what the container or Service publishes, as it says"
	}
	w.skip(atSocket, "the listener has none")
	w.broken(atListener, sentence(r.State, r.Detail), advice)
	return false
}

// who says who asked for a row.
func who(r subject) string {
	switch {
	case r.Owner.Kind == listener.KindDocker && r.Name != "":
		return "container " + r.Name
	case r.Owner.Kind == listener.KindDocker:
		return "container " + r.Owner.ID[:min(12, len(r.Owner.ID))]
	case r.Owner.Kind == listener.KindKubernetes:
		return "Service " + r.Owner.ID
	}
	return r.Owner.Kind + " " + r.Owner.ID
}

// walkSockets asks the kernel for the sockets of an open row.
func walkSockets(w *walk, r subject) {
	proto := listener.TCP
	if r.Protocol == listener.UDP.String() {
		proto = listener.UDP
	}
	var missing []string
	for _, text := range r.Bound {
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			continue
		}
		ap = netip.AddrPortFrom(ap.Addr(), ap.Port()+r.offset)
		if !listener.Bound(proto, ap) {
			missing = append(missing, ap.String())
		}
	}
	if len(missing) > 0 {
		w.broken(atSocket, "the kernel has no socket of the daemon's at "+strings.Join(missing, " and "), "restart the daemon, and report this with its log")
		return
	}
	w.ok(atSocket, "the kernel has the daemon's at %s", strings.Join(r.Bound, " and "))
}

// bindAdvice says what to do about a bind that failed.
func bindAdvice(r subject) string {
	again := "it is tried again"
	if !r.RetryAt.IsZero() {
		again += " in " + max(0, time.Until(r.RetryAt.Time)).Round(time.Second).String()
	}
	switch {
	case errors.Is(r.cause, listener.ErrInUse):
		return "stop what has it, or publish on another host port; " + again
	case errors.Is(r.cause, listener.ErrDenied):
		return "give the daemon the right, or publish on a higher host port; " + again
	case errors.Is(r.cause, listener.ErrNoAddress):
		return "publish on an address that the host has; " + again
	}
	return again
}

// tryGuestPort does what the relay does for a client: it connects, or sends a
// datagram, through the VM's stack.
func tryGuestPort(ctx context.Context, w *walk, r subject, c *checkup) {
	addr, first, last, ok := parsePorts(r.Guest)
	switch {
	case !c.reached:
		w.skip(atGuestPort, "the node is not reached")
		return
	case !ok || last-first < r.offset:
		w.say(atGuestPort, stepUnknown, fmt.Sprintf("%q is no address to try", r.Guest), "")
		return
	}
	to := netip.AddrPortFrom(addr, first+r.offset)
	ctx, cancel := context.WithTimeout(ctx, portWithin)
	defer cancel()
	if r.Protocol == listener.UDP.String() {
		tryUDP(ctx, w, c, to)
		return
	}
	began := time.Now()
	conn, err := c.link.DialContext(ctx, "tcp", to.String())
	if err == nil {
		took := time.Since(began)
		_ = conn.Close()
		w.ok(atGuestPort, "%s took a connection within %s", to, took.Round(time.Microsecond))
		return
	}
	sayRefused(w, r, to, err)
}

// sayRefused says what an error of connecting to the guest means.
func sayRefused(w *walk, r subject, to netip.AddrPort, err error) {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		advice := "start the server in the guest, and have it listen on every address, not on the guest's loopback; ss -ltn shows it"
		if r.Owner.Kind == listener.KindDocker {
			advice = "see whether the server in the container runs, and listens on every address and the port that is published; docker logs, docker port"
		}
		w.broken(atGuestPort, fmt.Sprintf("%s refuses: nobody listens there", to), advice)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		chain := "INPUT"
		if r.Owner.Kind != listener.KindConfig && r.Owner.Kind != listener.KindCLI {
			chain = "FORWARD" // what is published there is led on, to a container or a pod
		}
		w.broken(atGuestPort, fmt.Sprintf("%s does not answer, while the node does: most likely the guest's firewall drops it", to),
			fmt.Sprintf("let %s/tcp in, in the guest: iptables -L %s, nft list ruleset", to, chain))
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		w.broken(atGuestPort, fmt.Sprintf("the guest answers that %s cannot be reached", to),
			"the guest has no route there, or its firewall rejects it: ip route, iptables -L, nft list ruleset")
	case errors.Is(err, net.ErrClosed):
		w.skip(atGuestPort, "the VM left meanwhile")
	default:
		w.say(atGuestPort, stepUnknown, err.Error(), "")
	}
}

// errHeard ends a wait for a datagram.
var errHeard = errors.New("an answer")

// tryUDP sends an empty datagram. A server need not answer it, so silence is not
// held against one.
func tryUDP(ctx context.Context, w *walk, c *checkup, to netip.AddrPort) {
	conn, err := c.link.DialUDP(to)
	if err != nil {
		w.say(atGuestPort, stepUnknown, err.Error(), "")
		return
	}
	defer conn.Close()
	heard := make(chan error, 1)
	conn.Receive(func(_ []relay.Datagram, err error) {
		if err == nil {
			err = errHeard
		}
		select {
		case heard <- err:
		default: // the first tells enough
		}
	})
	if _, err := conn.Write([][]byte{nil}); err != nil {
		w.say(atGuestPort, stepUnknown, err.Error(), "")
		return
	}
	timeout := time.NewTimer(udpWithin)
	defer timeout.Stop()
	select {
	case err = <-heard:
	case <-timeout.C:
		err = context.DeadlineExceeded
	case <-ctx.Done():
		err = ctx.Err()
	}
	switch {
	case errors.Is(err, errHeard):
		w.ok(atGuestPort, "%s answered an empty datagram", to)
	case errors.Is(err, syscall.ECONNREFUSED):
		w.broken(atGuestPort, fmt.Sprintf("%s refuses: nobody listens there", to),
			"start the server in the guest, and have it listen on every address; ss -lun shows it")
	case errors.Is(err, context.DeadlineExceeded):
		w.say(atGuestPort, stepUnknown, fmt.Sprintf("%s did not answer an empty datagram, which a server need not: it cannot be told from a firewall that drops", to), "")
	default:
		w.say(atGuestPort, stepUnknown, err.Error(), "")
	}
}

// walkOwner looks at whom a row belongs to: whether it is still there.
func walkOwner(w *walk, r subject, c *checkup) {
	switch r.Owner.Kind {
	case listener.KindDocker:
		walkContainer(w, r, c)
	case listener.KindKubernetes:
		walkService(w, r, c)
	}
}

func walkContainer(w *walk, r subject, c *checkup) {
	one, runs := c.runs[r.Owner.ID]
	switch {
	case c.runs == nil:
		w.skip(atContainer, "the engine has not said what runs")
	case !runs:
		w.broken(atContainer, who(r)+" runs no longer, and its rows are about to go", "docker start "+r.Name)
	case r.State == listener.Pending.String():
		w.broken(atContainer, sentence("pending", r.Detail), "wait for it; `culvert ls -w` shows when")
	default:
		w.ok(atContainer, "%s runs", cmp.Or(one.Name, who(r)))
	}
}

func walkService(w *walk, r subject, c *checkup) {
	switch {
	case c.link == nil:
		w.skip(atService, "the VM is %s", c.state)
	case r.State == listener.Pending.String():
		w.broken(atService, sentence(who(r)+" is pending", r.Detail), "see what the cluster's load balancer does: kubectl describe service, kubectl get pods -A")
	case !c.services.Reachable:
		w.skip(atService, "the API server has not answered")
	default:
		w.ok(atService, "%s is there, and has its address", who(r))
	}
}
