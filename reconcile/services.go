package reconcile

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/culvertnet/culvert/guest/kube"
	"github.com/culvertnet/culvert/stack/listener"
)

// # Theory of operation
//
// Of a cluster every complete listing becomes a Snapshot, and nothing else does:
// an API server that does not answer changes no listener (C-44). What one
// Service wants follows from that Service alone (servicesport.go); what is
// decided between Services is
//
//   - who asks first: the older Service, and of two of one second the one whose
//     namespace/name sorts first. So the order is the same after a restart, and
//     of two Services that first appear in one listing the older gets the port
//     (C-45). Later ones wait for it in the ledger, which evicts nobody.
//   - that a Service made again under its name, which has another UID, is
//     another one (C-42). Its ports have the owners of its predecessor, so a
//     single Snapshot would leave it its predecessor's place, before those that
//     have waited longer. Therefore the predecessor's going is said in a
//     Snapshot of its own first; then the new one asks as everybody does.
//   - how many ports there may be at all (maxServicePorts): the cluster is the
//     guest's, and each port costs the host sockets.
//
// A Service's port is either a listener or a Note, never both: a Note for what
// waits in the guest or cannot be served, a Spec for everything of which the
// Publisher knows the state.

const (
	// ServicesName is the Name of every Services: what Loop.Hold takes for
	// `culvert kubernetes stop`.
	ServicesName = "services"
	// maxServicePorts bounds the ports of all of a cluster's Services; those that
	// ask last are left out. Each costs two sockets and some 3 KB.
	maxServicePorts = 20000
	// warnAt is how many failures in a row are said (C-44): the API server of a
	// cluster that starts fails a few times, every time.
	warnAt = 15
	// maxText bounds a reason for which the API does not answer: it may come from
	// the guest.
	maxText = 200
)

// The ways to a Service's port, vms[].kubernetes.reach in the config (C-42).
const (
	ReachAuto     = "auto"     // where the cluster's load balancer says
	ReachNodePort = "nodeport" // the node's NodePort, load balancer or not
)

// A cluster tells of its Services. *kube.Client is one.
type cluster interface {
	// Follow calls told with what is learned, one call at a time, until ctx ends
	// (its error) or following is not possible (why).
	Follow(ctx context.Context, told func(kube.Update)) error
	// Endpoint is the API server's URL, or what is known of it; any goroutine asks.
	Endpoint() string
}

// ServicesOptions say whose Services are followed and where they are reached.
type ServicesOptions struct {
	VM         string
	Generation uint64
	Cluster    cluster
	// Node is the node's address, Gateway ours on its link; both are IPv4.
	Node, Gateway netip.Addr
	// Reach is ReachAuto, the default, or ReachNodePort.
	Reach  string
	Policy listener.Policy
	Log    *slog.Logger
}

// Services is the Source of the Services of type LoadBalancer of one VM's
// cluster, for one life of the VM. Its methods are safe for concurrent use; Run
// runs once at a time.
type Services struct {
	opts ServicesOptions
	log  *slog.Logger

	// Of Run.
	uids map[string]string // of the last listing, by namespace/name
	said []Want            // the last snapshot's
	full bool              // more than maxServicePorts was said

	mu     sync.Mutex
	status ServicesStatus
}

// ServicesStatus is how it stands with a cluster's API server.
type ServicesStatus struct {
	Endpoint  string
	Reachable bool
	// Detail is why it is not reachable, or what is left out although it is.
	Detail   string
	Failures int       // in a row
	LastGood time.Time // when it last said which Services there are
}

// NewServices returns a Services that has asked nothing yet.
func NewServices(o ServicesOptions) *Services {
	return &Services{
		opts: o, log: o.Log.With("vm", o.VM),
		status: ServicesStatus{Detail: "not asked yet"},
	}
}

// Name implements Source.
func (s *Services) Name() string { return ServicesName }

// Generation returns the life of the VM in which the API server is asked.
func (s *Services) Generation() uint64 { return s.opts.Generation }

// Status returns how it stands with the API server.
func (s *Services) Status() ServicesStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	status.Endpoint = s.opts.Cluster.Endpoint() // which may change with the kubeconfig
	return status
}

// Run implements Source. It remembers from one run to the next what is needed to
// tell a Service that was made again, and how often in a row it has failed.
func (s *Services) Run(ctx context.Context, out chan<- Snapshot) error {
	err := s.opts.Cluster.Follow(ctx, func(u kube.Update) {
		if u.Err != nil {
			s.failed(u.Err, u.Failures)
			return
		}
		s.listed(ctx, u.Services, out)
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		s.failed(err, 0)
	}
	return err
}

// failed takes note of a failure, the inRow-th one where that is known.
func (s *Services) failed(err error, inRow int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.status.Failures
	s.status.Reachable = false
	s.status.Detail = clip(err.Error(), maxText)
	s.status.Failures = max(before+1, inRow)
	if before < warnAt && s.status.Failures >= warnAt {
		s.log.Warn("Kubernetes API does not answer; listeners stay as they are",
			"endpoint", s.opts.Cluster.Endpoint(), "failures", s.status.Failures, "err", s.status.Detail)
	}
}

// listed states what services want. When it returns the loop has it, or ctx has
// ended.
func (s *Services) listed(ctx context.Context, services []kube.Service, out chan<- Snapshot) {
	wants, uids, left := s.wants(services)
	s.answered(left)
	replaced := func(w Want) bool {
		service, _, _ := strings.Cut(w.Owner.ID, ":")
		uid, there := uids[service]
		return there && uid != s.uids[service]
	}
	if slices.ContainsFunc(s.said, replaced) {
		if !s.send(ctx, out, slices.DeleteFunc(slices.Clone(s.said), replaced)) {
			return
		}
	}
	if s.send(ctx, out, wants) {
		s.said, s.uids = wants, uids
	}
}

func (s *Services) send(ctx context.Context, out chan<- Snapshot, wants []Want) bool {
	select {
	case out <- Snapshot{Source: ServicesName, VM: s.opts.VM, Generation: s.opts.Generation, Wants: wants}:
		return true
	case <-ctx.Done():
		return false
	}
}

// answered takes note of a listing of which left ports were left out.
func (s *Services) answered(left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Failures >= warnAt {
		s.log.Info("Kubernetes API answers again", "endpoint", s.opts.Cluster.Endpoint(), "failures", s.status.Failures)
	}
	s.status = ServicesStatus{Reachable: true, LastGood: time.Now()}
	if left > 0 {
		s.status.Detail = fmt.Sprintf("the Services have %d ports more than the %d that are published", left, maxServicePorts)
		if !s.full {
			s.log.Warn("too many ports of Services; those of the newest are left out", "left out", left, "limit", maxServicePorts)
		}
	}
	s.full = left > 0
}

// wants returns what services want, in the order of asking, the UID of each that
// is of type LoadBalancer, by namespace/name, and how many ports are left out.
func (s *Services) wants(services []kube.Service) (wants []Want, uids map[string]string, left int) {
	balanced := make([]*kube.Service, 0, len(services))
	ports := 0
	for i := range services {
		// The type decides, whatever else is set (FB-103, FB-104).
		if svc := &services[i]; svc.LoadBalancer {
			balanced = append(balanced, svc)
			ports += len(svc.Ports)
		}
	}
	slices.SortFunc(balanced, func(a, b *kube.Service) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	uids = make(map[string]string, len(balanced))
	wants = make([]Want, 0, min(ports, maxServicePorts))
	for _, svc := range balanced {
		name := svc.Namespace + "/" + svc.Name
		if _, twice := uids[name]; twice {
			s.log.Debug("Service listed twice, ignored", "service", name)
			continue
		}
		uids[name] = svc.UID
		room := maxServicePorts - len(wants)
		of := s.wantsOf(svc, room)
		wants = append(wants, of...)
		if len(of) == room {
			left += len(svc.Ports) - len(of)
		}
	}
	return wants, uids, left
}
