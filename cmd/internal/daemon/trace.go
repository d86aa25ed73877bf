package daemon

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
)

// newTracer returns the tracer of every VM's link.
func (d *Daemon) newTracer(c *Config) *trace.Tracer {
	lookup := stack.NewLookup(d.forwarder)
	called := &ownerNames{names: d.loop.Names()}
	return trace.New(trace.Options{
		Flow: func(k trace.FlowKey) (trace.Flow, bool) {
			proto := listener.TCP
			if k.Protocol == 17 {
				proto = listener.UDP
			}
			o, id, ok := lookup.Find(k.VM, proto, k.Gateway, k.Guest)
			if !ok {
				return trace.Flow{}, false
			}
			return trace.Flow{Owner: o.Kind + " " + called.of(o), ID: id}, true
		},
		FlightPath:   func(vm string) string { return flightPath(c.API, vm) },
		FlightFrames: c.Trace.FlightRecorder,
	})
}

// namesAge is how old the names of owners in a trace may be.
const namesAge = time.Second

// ownerNames calls owners as people do: a container by its name.
type ownerNames struct {
	names *reconcile.Names

	mu   sync.Mutex
	made time.Time
	byID map[string]string
}

func (n *ownerNames) of(o listener.Owner) string {
	if o.Kind != listener.KindDocker {
		return o.ID
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if time.Since(n.made) > namesAge {
		n.made, n.byID = time.Now(), make(map[string]string)
		for _, v := range n.names.Views() {
			for _, holder := range v.Owners {
				if was, ok := n.byID[holder.ID]; !ok || len(v.Name) < len(was) {
					n.byID[holder.ID] = v.Name
				}
			}
		}
	}
	if name, ok := n.byID[o.ID]; ok {
		return name
	}
	return o.ID[:min(len(o.ID), 12)] // as docker shortens it
}

// Trace implements api.Backend.
func (d *Daemon) Trace(r api.TraceRequest) (api.Trace, error) {
	o := trace.ReaderOptions{VM: r.VM, Snap: r.Snap, Drops: r.Drops}
	if r.VM != "" {
		if _, err := d.pick(r.VM); err != nil {
			return nil, err
		}
	}
	if r.Filter != "" {
		var err error
		if o.Filter, err = trace.ParseFilter(r.Filter); err != nil {
			return nil, &api.Problem{Status: http.StatusBadRequest, Detail: err.Error()}
		}
	}
	reader, err := d.tracer.Open(o)
	if errors.Is(err, trace.ErrTooMany) {
		return nil, &api.Problem{Status: http.StatusServiceUnavailable, Detail: err.Error()}
	}
	return reader, err
}

// flightPath returns where the flight recorder of a VM lies: beside the API's
// socket, which is its daemon's alone.
func flightPath(socket, vm string) string { return flightBase(socket) + vm + ".flight" }

func flightBase(socket string) string { return strings.TrimSuffix(socket, ".sock") + "." }

// FlightFiles returns the flight recorders' files that daemons at socket have
// left, of one VM or, with none named, of all: for each VM the older file first.
func FlightFiles(socket, vm string) ([]string, error) {
	dir, base := filepath.Split(flightBase(socket))
	entries, err := os.ReadDir(filepath.Clean(dir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look for flight recorders: %w", err)
	}
	var files []string
	for _, e := range entries {
		rest, ours := strings.CutPrefix(e.Name(), base)
		of, recorder := strings.CutSuffix(strings.TrimSuffix(rest, ".old"), ".flight")
		if ours && recorder && (vm == "" || of == vm) {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	slices.SortFunc(files, func(a, b string) int { // "x.flight.old" before "x.flight"
		if a+".old" == b || b+".old" == a {
			return len(b) - len(a)
		}
		return strings.Compare(a, b)
	})
	return files, nil
}
