package daemon

import (
	"context"
	"fmt"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// reachedEvery is how often it is looked whether engines and clusters answer: one
// that is away for less may go unseen.
const reachedEvery = time.Second

// Events implements api.Backend.
func (d *Daemon) Events(ctx context.Context, started func(), emit func(api.Event) error) error {
	vms, cancel := d.vms.Subscribe()
	defer func() { cancel() }()
	changed, noted := d.forwarder.Changed(), d.loop.Changed()
	before, answering := index(d.ledger()), d.answering()
	look := time.NewTicker(reachedEvery)
	defer look.Stop()
	started()
	for {
		var events []api.Event
		select {
		case <-ctx.Done():
			return ctx.Err()
		case v, ok := <-vms:
			switch {
			case ok:
				events = []api.Event{vmEvent(v)}
			case d.ending.Err() != nil:
				return nil
			default:
				// The client is too far behind: it is told how things are now.
				vms, cancel = d.vms.Subscribe()
				for _, v := range d.vms.Views() {
					events = append(events, vmEvent(v))
				}
			}
		case <-look.C:
			now := d.answering()
			events = answerEvents(answering, now)
			answering = now
		case <-changed:
			changed = d.forwarder.Changed()
			before, events = d.rowEvents(before)
		case <-noted:
			noted = d.loop.Changed()
			before, events = d.rowEvents(before)
		}
		for _, e := range events {
			if err := emit(e); err != nil {
				return err
			}
		}
	}
}

func vmEvent(v reconcile.VMView) api.Event {
	return api.Event{At: api.Time{Time: v.Since}, Kind: "vm." + v.State.String(), VM: v.Name, Reason: v.Detail}
}

// A rowKey names a row over time.
type rowKey struct {
	owner    api.Owner
	host     string
	protocol string
	guest    string
}

func index(rows []api.Listener) map[rowKey]api.Listener {
	m := make(map[rowKey]api.Listener, len(rows))
	for _, r := range rows {
		k := rowKey{r.Owner, r.Host, r.Protocol, r.Guest}
		if r.Owner.Kind == listener.KindConfig || r.Owner.Kind == listener.KindCLI {
			k.host = "" // there is one for each owner, whose port the kernel may pick anew
		}
		m[k] = r
	}
	return m
}

// rowEvents reads the ledger and returns what has changed since it was read
// before.
func (d *Daemon) rowEvents(before map[rowKey]api.Listener) (now map[rowKey]api.Listener, events []api.Event) {
	now = index(d.ledger())
	event := func(kind string, at time.Time, r api.Listener, reason string) {
		events = append(events, api.Event{
			At: api.Time{Time: at}, Kind: "row." + kind, VM: r.VM, Owner: r.Owner, Row: r.Host + "/" + r.Protocol, Reason: reason,
		})
	}
	for k, r := range now {
		if old, ok := before[k]; !ok || old.State != r.State || old.Detail != r.Detail {
			event(r.State, r.Since.Time, r, r.Detail)
		}
	}
	for k, r := range before {
		if _, ok := now[k]; !ok {
			event("gone", time.Now(), r, "")
		}
	}
	return now, events
}

// An answerer is who in a VM may answer: its "engine" or its "cluster".
type answerer struct{ what, vm string }

// An answer says whether it does, and if not why not.
type answer struct {
	reachable bool
	detail    string
}

// answering says who answers now of those that are followed.
func (d *Daemon) answering() map[answerer]answer {
	now := make(map[answerer]answer)
	for _, v := range d.vms.Views() {
		a := d.vm(v.Name)
		if a == nil {
			continue // removed meanwhile
		}
		say := func(what string, reachable bool, detail string) {
			if !reachable && v.State != reconcile.VMReady {
				detail = fmt.Sprintf("VM %s is %s", v.Name, v.State)
			}
			now[answerer{what, v.Name}] = answer{reachable, detail}
		}
		config := a.guest.config.Load()
		if config.Docker != (DockerConfig{}) {
			e := engineOf(config.Docker.Endpoint, a)
			say("engine", e.Reachable, e.Detail)
		}
		if config.Kubernetes != (KubernetesConfig{}) {
			s := a.cluster()
			say("cluster", s.Reachable, s.Detail)
		}
	}
	return now
}

// answerEvents returns who began, or ceased, to answer between two looks.
func answerEvents(before, now map[answerer]answer) (events []api.Event) {
	for who, is := range now {
		if is.reachable == before[who].reachable {
			continue
		}
		e := api.Event{At: api.Time{Time: time.Now()}, Kind: who.what + ".reachable", VM: who.vm}
		if !is.reachable {
			e.Kind, e.Reason = who.what+".unreachable", is.detail
		}
		events = append(events, e)
	}
	return events
}
