package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/attach"
	"github.com/culvertnet/culvert/guest/docker"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// A checkup is what was found of one VM.
type checkup struct {
	walk
	engine, cluster bool // whether they are asked for

	state   reconcile.VMState
	link    *link // nil unless the VM is attached and runs
	reached bool  // the node answers
	follows bool  // the VM has an engine or a cluster to follow
	listed  bool  // and all of them have answered

	runs     map[string]docker.Container // by ID, if the engine has answered
	services reconcile.ServicesStatus
}

// checkUp walks what all rows of a VM share.
func (d *Daemon) checkUp(ctx context.Context, c *checkup) {
	view, a, ok := d.viewOf(c.vm)
	if !ok {
		c.broken(atVM, "there is no VM of this name any more", "take what leads to it back: `culvert unpublish --vm "+c.vm+"`")
		c.skip(atLink, "there is no VM")
		c.skip(atNode, "there is no VM")
		return
	}
	c.state = view.State
	c.follows, c.listed = a.guest.config.Load().followed(), true
	l := a.current()
	why := ""
	switch {
	case view.State == reconcile.VMPaused:
		why = "the VM is paused"
		c.broken(atVM, sentence("paused", view.Detail), "resume it in its VMM (QEMU's monitor: cont); its ports stay open meanwhile")
	case view.State == reconcile.VMWaiting, view.State == reconcile.VMGone, l == nil:
		why = "the VM is " + view.State.String()
		c.broken(atVM, sentence(view.State.String(), view.Detail), comeBack(a.vm))
	default:
		c.ok(atVM, "attached as %s, %s for %s, life %d", a.vm.Attach, view.State, forHowLong(view.Since), view.Generation)
	}
	if why != "" {
		for _, step := range []string{atLink, atNode} {
			c.skip(step, "%s", why)
		}
	} else {
		c.link = l
	}
	var looking sync.WaitGroup
	engine, cluster := walk{vm: c.vm}, walk{vm: c.vm}
	if c.engine && a.guest.config.Load().Docker != (DockerConfig{}) {
		looking.Go(func() { c.askEngine(ctx, &engine, a, why) })
	}
	if c.cluster && a.guest.config.Load().Kubernetes != (KubernetesConfig{}) {
		d.readCluster(c, &cluster, a, why)
	}
	if c.link != nil {
		c.probe(ctx, a.vm)
	}
	looking.Wait()
	c.steps = append(append(c.steps, engine.steps...), cluster.steps...)
	if len(engine.steps) > 0 && engine.steps[0].State != stepOK || len(cluster.steps) > 0 && cluster.steps[0].State != stepOK {
		c.listed = false
	}
}

// followed says whether containers or Services are followed.
func (c *VMGuest) followed() bool {
	return c.Docker != (DockerConfig{}) || c.Kubernetes != (KubernetesConfig{})
}

// comeBack says how a VM is attached that is not.
func comeBack(vm VMLink) string {
	s := vm.Attach
	switch s.Transport {
	case attach.QEMU:
		if s.Dial {
			return "start the VM with -netdev stream,id=n0,server=on,… at " + s.Address + " and a NIC on it"
		}
		return "start the VM with -netdev stream,id=n0,server=off,… to " + s.Address + "; a QEMU before 8.0 connects only when it starts"
	case attach.VhostUser:
		return "start the VM with a vhost-user network card on " + s.Address + " and shared memory"
	case attach.Unixgram:
		return "start the VM with its datagram socket's peer at " + s.Address
	case attach.Tap:
		if s.NetNS != "" {
			return "see that there is a network namespace " + s.NetNS + "; culvert makes " + s.Address + " in it"
		}
	}
	return "start the VM"
}

// linkDrops are the reasons for which frames do not reach a guest.
var linkDrops = []datapath.DropReason{
	datapath.DropQueueFull, datapath.DropLinkDown, datapath.DropNoMemory, datapath.DropRejected,
}

// probe asks the node through the datapath, and looks at the link meanwhile: where
// the frames of the question were dropped, it is the link that is broken.
func (c *checkup) probe(ctx context.Context, vm VMLink) {
	stats := c.link.Stats().Link
	before := make(map[datapath.DropReason]uint64)
	for _, r := range linkDrops {
		before[r] = stats.Drops(r)
	}
	rtt, err := time.Duration(0), error(nil)
	for range probeTries {
		limited, cancel := context.WithTimeout(ctx, probeWithin)
		rtt, err = c.link.Probe(limited)
		cancel()
		if err == nil || !errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	c.reached = err == nil

	last := c.link.LastFrame()
	seen := fmt.Sprintf("last frame from the guest %s ago", forHowLong(last))
	if last.IsZero() {
		seen = "no frame has come from the guest"
	}
	if drops := stats.AllDrops(); len(drops) > 0 {
		var parts []string
		for _, reason := range slices.Sorted(maps.Keys(drops)) {
			parts = append(parts, fmt.Sprintf("%s %d", reason, drops[reason]))
		}
		seen += "; dropped so far: " + strings.Join(parts, ", ")
	}
	var lost []string
	down := false
	for _, r := range linkDrops {
		if n := stats.Drops(r) - before[r]; n > 0 {
			lost = append(lost, fmt.Sprintf("%d just now for %s", n, r))
			down = down || r == datapath.DropLinkDown
		}
	}
	stalled := c.link.Stalled()
	switch {
	case stalled >= stallShown:
		c.broken(atLink, fmt.Sprintf("frames wait, of which the guest has taken none for %s; %s", forHowLong(time.Now().Add(-stalled)), seen),
			"see whether the VM runs or hangs; its console and its VMM tell")
		if err == nil { // over another queue
			c.ok(atNode, "%s answers within %s", vm.Node, rtt.Round(time.Microsecond))
			return
		}
	case err == nil:
		c.ok(atLink, "%s", seen)
		c.ok(atNode, "%s answers within %s", vm.Node, rtt.Round(time.Microsecond))
		return
	case down:
		c.broken(atLink, "the guest's interface is down: "+strings.Join(lost, ", "), "in the guest: ip link set IFACE up")
	case lost != nil:
		c.broken(atLink, "the guest takes no frames: "+strings.Join(lost, ", "), "see whether the VM runs or hangs; its console and its VMM tell")
	case last.IsZero():
		c.broken(atLink, seen, "see whether the VM has booted and its network card on culvert's link is up: ip link set IFACE up")
	case !errors.Is(err, context.DeadlineExceeded):
		c.broken(atLink, err.Error(), comeBack(vm))
	default:
		c.ok(atLink, "%s", seen)
		c.broken(atNode, fmt.Sprintf("%s does not answer ARP: asked %d times, %s each", vm.Node, probeTries, probeWithin),
			fmt.Sprintf("in the guest, on culvert's interface: ip link set IFACE up arp on, ip addr add %s/%d dev IFACE; or the guest hangs", vm.Node, vm.Gateway.Bits()))
		return
	}
	c.skip(atNode, "the link is broken")
}

// askEngine has the engine list its containers, now: with the client that follows
// it, which remembers what it need not ask again.
func (c *checkup) askEngine(ctx context.Context, w *walk, a *attacher, why string) {
	source := a.guest.containers.Load()
	if why == "" && source == nil {
		why = "the VM has not been ready yet"
	}
	if why != "" {
		w.skip(atEngine, "%s", why)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, engineWithin)
	defer cancel()
	began := time.Now()
	list, err := source.Engine.Containers(ctx)
	if err != nil {
		w.broken(atEngine, err.Error(),
			"see in the guest whether the engine runs and listens there; rows of containers stay as they are until it answers")
		return
	}
	c.runs = make(map[string]docker.Container, len(list))
	for _, one := range list {
		c.runs[one.ID] = one
	}
	w.ok(atEngine, "%s listed %d running containers within %s", a.guest.config.Load().Docker.Endpoint, len(list), time.Since(began).Round(time.Millisecond))
}

// readCluster says how it stands with the API server, which is watched all the
// time.
func (d *Daemon) readCluster(c *checkup, w *walk, a *attacher, why string) {
	c.services = a.cluster()
	s := c.services
	switch {
	case d.loop.Held(c.vm, reconcile.ServicesName):
		w.broken(atCluster, "its ports are not wanted since `culvert kubernetes stop`", "culvert kubernetes start --vm "+c.vm)
	case why != "":
		w.skip(atCluster, "%s", why)
	case !s.Reachable:
		w.broken(atCluster, sentence("the API server does not answer", s.Detail),
			"see in the guest whether it runs, and whether the kubeconfig is still its; ports of Services stay as they are until it answers")
	default:
		w.ok(atCluster, "%s last answered %s ago%s", s.Endpoint, forHowLong(s.LastGood), d.waiting(c.vm))
	}
}

// waiting names the ports of a VM's Services that wait for their cluster.
func (d *Daemon) waiting(vm string) string {
	var names []string
	for _, n := range d.loop.Notes() {
		if n.Owner.VM == vm && n.Owner.Kind == listener.KindKubernetes && n.State == listener.Pending {
			names = append(names, n.Owner.ID)
		}
	}
	slices.Sort(names)
	const most = 3
	more := ""
	if len(names) > most {
		names, more = names[:most], fmt.Sprintf(" and %d more", len(names)-most)
	}
	if names == nil {
		return ""
	}
	return "; pending: Service " + strings.Join(names, ", ") + more
}

// sentence joins a word and what is known more of it.
func sentence(what, more string) string {
	if more == "" {
		return what
	}
	return what + ": " + more
}

// forHowLong is the time since t, for people.
func forHowLong(t time.Time) string {
	d := time.Since(t)
	switch {
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	default:
		return d.Round(time.Second).String()
	}
}
