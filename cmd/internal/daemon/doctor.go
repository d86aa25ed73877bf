package daemon

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// # Theory of operation
//
// A walk goes the way of a client's bytes, and looks at each step when it is
// asked, not at what was noted of it earlier:
//
//	host socket ─► listener ─► vm ─► link ─► node ─► guest port ─► container, service
//	└──────── of a row ────┘   └── of a VM, once ──┘ └─────────── of a row ─────────┘
//	                                      └─► engine, cluster
//
// A step is broken if it is what has to be put right, and skipped if it cannot be
// looked at, or is shut, because of another that is. So a VM that is gone has
// broken "vm", while its rows' sockets, which are closed for that reason, are
// skipped. Steps that do not depend on each other are all looked at: a host port
// that is taken says nothing of the guest.
//
// VMs are looked at all at once, then rows likewise. The longest way is a node that
// does not answer (probeTries × probeWithin = 3 s) or an engine (engineWithin = 3 s,
// beside it), and then a guest port (portWithin = 3 s): 9 s at most.

const (
	doctorWithin = 9 * time.Second // the whole, whatever happens
	probeTries   = 2
	probeWithin  = 1500 * time.Millisecond
	engineWithin = 3 * time.Second
	portWithin   = 3 * time.Second // as long as a client's connection is given (timeouts.connect)
	udpWithin    = time.Second     // for an answer to a datagram, of which there need not be one
	// maxPortsTried bounds the connections that one question makes into guests.
	maxPortsTried = 32
)

// The states of a step.
const (
	stepOK      = "ok"
	stepBroken  = "broken"
	stepSkipped = "skipped"
	stepUnknown = "unknown"
)

// The steps.
const (
	atSocket    = "host socket"
	atListener  = "listener"
	atVM        = "vm"
	atLink      = "link"
	atNode      = "node"
	atEngine    = "engine"
	atCluster   = "cluster"
	atGuestPort = "guest port"
	atContainer = "container"
	atService   = "service"
)

// A walk collects the steps of one row, or of one VM.
type walk struct {
	vm, row string
	steps   []api.Step
}

func (w *walk) say(step, state, detail, advice string) {
	w.steps = append(w.steps, api.Step{VM: w.vm, Row: w.row, Step: step, State: state, Detail: detail, Advice: advice})
}

func (w *walk) ok(step, format string, args ...any) {
	w.say(step, stepOK, fmt.Sprintf(format, args...), "")
}

func (w *walk) skip(step, format string, args ...any) {
	w.say(step, stepSkipped, fmt.Sprintf(format, args...), "")
}

func (w *walk) broken(step, detail, advice string) { w.say(step, stepBroken, detail, advice) }

// Doctor implements api.Backend.
func (d *Daemon) Doctor(ctx context.Context, vm, of string) ([]api.Step, error) {
	if vm != "" {
		if _, err := d.pick(vm); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, doctorWithin)
	defer cancel()
	rows, err := d.subjects(vm, of)
	if err != nil {
		return nil, err
	}
	checkups := d.checkups(ctx, vm, of, rows)
	heads, tails := d.walkRows(ctx, rows, checkups)

	var steps []api.Step
	if len(rows) == 1 && of != "" {
		steps = append(steps, heads[0]...)
		steps = append(steps, checkups[rows[0].VM].steps...)
		return append(steps, tails[0]...), nil
	}
	if len(rows) == 0 && of != "" {
		steps = append(steps, d.nothing(of, checkups)...)
	}
	for _, name := range slices.Sorted(maps.Keys(checkups)) {
		steps = append(steps, checkups[name].steps...)
		for i, r := range rows {
			if r.VM != name {
				continue
			}
			if of == "" { // of many rows only what matters
				heads[i] = slices.DeleteFunc(heads[i], func(s api.Step) bool { return s.State == stepOK })
			}
			steps = append(append(steps, heads[i]...), tails[i]...)
		}
	}
	return steps, nil
}

// A subject is a row that is walked.
type subject struct {
	api.Listener
	cause  error  // of its outcome, for errors.Is
	offset uint16 // of the port that is meant, in its range
}

// subjects returns the rows that of means, all of them when it is empty.
func (d *Daemon) subjects(vm, of string) ([]subject, error) {
	causes := make(map[rowKey]error)
	for _, r := range d.forwarder.Rows() {
		l := d.listener(r)
		causes[rowKey{l.Owner, l.Host, l.Protocol, l.Guest}] = r.Outcome.Err
	}
	var all []api.Listener
	for _, l := range d.ledger() {
		if vm == "" || l.VM == vm {
			all = append(all, l)
		}
	}
	var meant []subject
	take := func(matches func(api.Listener) (bool, uint16)) {
		for _, l := range all {
			if ok, offset := matches(l); ok {
				meant = append(meant, subject{l, causes[rowKey{l.Owner, l.Host, l.Protocol, l.Guest}], offset})
			}
		}
	}
	if of == "" {
		take(func(api.Listener) (bool, uint16) { return true, 0 })
		return meant, nil
	}
	if p, ok := parseHostPort(of); ok {
		if take(p.of); len(meant) > 0 {
			return meant, nil
		}
	}
	is, err := d.meant(of, all)
	if err != nil {
		return nil, err
	}
	take(func(l api.Listener) (bool, uint16) { return is(l), 0 })
	return meant, nil
}

// A hostPort is what a person calls a host port: "8080", "127.0.0.1:8080",
// "[::1]:8080/udp".
type hostPort struct {
	addr  netip.Addr // the zero Addr for any
	port  uint16
	proto string // empty for both
}

// parseHostPort reads a host port.
func parseHostPort(text string) (p hostPort, ok bool) {
	rest, proto, given := strings.Cut(text, "/")
	if given && proto != "tcp" && proto != "udp" {
		return p, false
	}
	p.proto = proto
	if ap, err := netip.ParseAddrPort(rest); err == nil {
		p.addr, p.port = ap.Addr().Unmap(), ap.Port()
		return p, p.port != 0
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(rest, ":"), 10, 16)
	p.port = uint16(n)
	return p, err == nil && n != 0
}

// of reports whether l has the port, and as which of its range.
func (p hostPort) of(l api.Listener) (has bool, offset uint16) {
	if p.proto != "" && p.proto != l.Protocol {
		return false, 0
	}
	for _, text := range append([]string{l.Host}, l.Bound...) {
		addr, first, last, ok := parsePorts(text)
		if ok && (!p.addr.IsValid() || p.addr == addr || addr.IsUnspecified()) && first <= p.port && p.port <= last {
			return true, p.port - first
		}
	}
	return false, 0
}

// parsePorts reads "IP:PORT" or "IP:FIRST-LAST", as rows have them.
func parsePorts(text string) (addr netip.Addr, first, last uint16, ok bool) {
	text, end, ranged := cutLast(text, "-")
	ap, err := netip.ParseAddrPort(text)
	if err != nil {
		return addr, 0, 0, false
	}
	first, last = ap.Port(), ap.Port()
	if ranged {
		n, err := strconv.ParseUint(end, 10, 16)
		if err != nil || uint16(n) < first {
			return addr, 0, 0, false
		}
		last = uint16(n)
	}
	return ap.Addr().Unmap(), first, last, true
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// checkups looks at the VMs of rows, or at all VMs where the question is about all
// or has found nothing, at once.
func (d *Daemon) checkups(ctx context.Context, vm, of string, rows []subject) map[string]*checkup {
	found := make(map[string]*checkup)
	wants := func(kind string) bool {
		return of == "" || len(rows) == 0 || slices.ContainsFunc(rows, func(s subject) bool { return s.Owner.Kind == kind })
	}
	add := func(name string) {
		if found[name] == nil {
			found[name] = &checkup{walk: walk{vm: name}, engine: wants(listener.KindDocker), cluster: wants(listener.KindKubernetes)}
		}
	}
	for _, r := range rows {
		add(r.VM)
	}
	if of == "" || len(rows) == 0 {
		for _, v := range d.vms.Views() {
			if vm == "" || v.Name == vm {
				add(v.Name)
			}
		}
	}
	var looking sync.WaitGroup
	for _, c := range found {
		looking.Go(func() { d.checkUp(ctx, c) })
	}
	looking.Wait()
	return found
}

// walkRows walks what of the rows is their own, at once: heads before the VM's
// steps, tails behind them.
func (d *Daemon) walkRows(ctx context.Context, rows []subject, checkups map[string]*checkup) (heads, tails [][]api.Step) {
	heads, tails = make([][]api.Step, len(rows)), make([][]api.Step, len(rows))
	tried := 0
	var walking sync.WaitGroup
	for i, r := range rows {
		c := checkups[r.VM]
		head := walk{vm: r.VM, row: r.Host + "/" + r.Protocol}
		tail := head
		open := d.walkHost(&head, r, c)
		heads[i] = head.steps
		if open && c.reached {
			if tried++; tried > maxPortsTried {
				tail.skip(atGuestPort, "%d were tried already; ask for this one", maxPortsTried)
				tails[i] = tail.steps
				continue
			}
		}
		walking.Go(func() {
			if open {
				tryGuestPort(ctx, &tail, r, c)
			} else {
				tail.skip(atGuestPort, "the listener is %s", r.State)
			}
			walkOwner(&tail, r, c)
			tails[i] = tail.steps
		})
	}
	walking.Wait()
	return heads, tails
}

// nothing is said where no row is what of names.
func (d *Daemon) nothing(of string, checkups map[string]*checkup) []api.Step {
	w := walk{}
	p, isPort := parseHostPort(of)
	if !isPort {
		w.broken(atListener, fmt.Sprintf("nothing with a host port is called %q: no container, no Service, no publish", of),
			"`culvert ls` lists all that is asked for; a container must run and publish a port"+engines(checkups))
		return w.steps
	}
	w.row = of
	detail := fmt.Sprintf("nobody asks for host port %s", of)
	for _, proto := range []listener.Proto{listener.TCP, listener.UDP} {
		for _, addr := range []netip.Addr{p.addr, netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
			if !addr.IsValid() || p.proto != "" && p.proto != proto.String() || p.addr.IsValid() && addr != p.addr {
				continue
			}
			if who := listener.Holder(proto, netip.AddrPortFrom(addr, p.port)); who != "" && !strings.Contains(detail, proto.String()) {
				detail += fmt.Sprintf("; %s has %s/%s", who, netip.AddrPortFrom(addr, p.port), proto)
			}
		}
	}
	w.skip(atSocket, "culvert has none there")
	start := "start the container or Service that publishes it"
	if left, ok := d.departed.who(p); ok {
		was := subject{Listener: api.Listener{Owner: ownerOf(left.owner), Name: left.name}}
		detail += fmt.Sprintf("; %s did in VM %s, until %s ago", who(was), left.owner.VM, forHowLong(left.at))
		if left.owner.Kind == listener.KindDocker {
			start = "docker start " + cmp.Or(left.name, was.Owner.ID[:min(12, len(was.Owner.ID))])
		}
	}
	w.broken(atListener, detail, fmt.Sprintf("%s, or `culvert publish %d:GUESTPORT`; `culvert ls` lists all that is asked for%s", start, p.port, engines(checkups)))
	return w.steps
}

// engines says which of the VMs looked at hide what their engines run.
func engines(checkups map[string]*checkup) string {
	var hidden []string
	for _, name := range slices.Sorted(maps.Keys(checkups)) {
		if c := checkups[name]; c.follows && !c.listed {
			hidden = append(hidden, name)
		}
	}
	if hidden == nil {
		return ""
	}
	return "; what runs in " + strings.Join(hidden, ", ") + " is not known now"
}

// viewOf is a VM's view, and whether there is such a VM.
func (d *Daemon) viewOf(name string) (v reconcile.VMView, a *attacher, ok bool) {
	v, ok = d.vms.View(name)
	a = d.vm(name)
	return v, a, ok && a != nil
}
