package daemon

import (
	"runtime"
	"strconv"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/cmd/internal/names"
	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack"
	"github.com/culvertnet/culvert/stack/listener"
	"github.com/prometheus/client_golang/prometheus"
)

// # Theory of operation
//
// Packages count for themselves and know nothing of Prometheus. Here nothing is
// counted: a scrape reads what they have counted, and what the API would say of
// the VMs, so that `culvert vms`, /healthz and the metrics tell one truth.
//
// There is a series for each VM and reason, never for a row, a flow, a container
// or a client: what a guest or a client does makes none. A series that has a
// meaning is there from the beginning, at 0, so that its first event is seen.

// A family is one metric with its labels.
type family struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// families are all there are but the histogram.
var families []family

func newFamily(kind prometheus.ValueType, name, help string, labels []string) family {
	f := family{prometheus.NewDesc("culvert_"+name, help, labels, nil), kind}
	families = append(families, f)
	return f
}

func gauge(name, help string, labels ...string) family {
	return newFamily(prometheus.GaugeValue, name, help, labels)
}

func counter(name, help string, labels ...string) family {
	return newFamily(prometheus.CounterValue, name, help, labels)
}

// perLife is said of counters of a VM's attachment.
const perLife = " Begins anew with each attachment."

var (
	buildInfo = gauge("build_info", "1, with the version that runs.", "version", "goversion")

	listeners    = gauge("listeners", "Rows of the ledger, by who asked and what became of them.", "vm", "kind", "state")
	flows        = gauge("flows", "Live flows.", "vm", "protocol")
	flowsTotal   = counter("flows_total", "Flows begun, those that the guest then refused among them.", "vm", "protocol")
	bytesTotal   = counter("bytes_total", "Payload bytes carried.", "vm", "protocol", "direction")
	endedTotal   = counter("flows_ended_total", "TCP flows that the guest had taken, by why they ended.", "vm", "protocol", "end")
	refusedTotal = counter("refused_total", "Clients that got no flow or lost it, and datagrams dropped, by reason.", "vm", "protocol", "reason")

	vmState      = gauge("vm_state", "1 for the state that the VM is in, 0 for the others. Only in ready does traffic get through.", "vm", "state")
	vmGeneration = gauge("vm_generation", "Lives of the VM so far: attachments and resets.", "vm")
	vmProbeOK    = gauge("vm_probe_ok", "Whether the last question to the node through the datapath was answered.", "vm")
	vmProbeAt    = gauge("vm_probe_timestamp_seconds", "When the last probe ended.", "vm")
	vmProbeRTT   = gauge("vm_probe_rtt_seconds", "Round-trip time of the last probe that was answered.", "vm")
	vmLastFrame  = gauge("vm_last_frame_timestamp_seconds", "When a frame last came from the guest.", "vm")
	vmQueues     = gauge("vm_queues", "Queue pairs in use.", "vm")
	vmOffload    = gauge("vm_offload", "1 for each offload in use towards the guest.", "vm", "offload")
	vmEndpoints  = gauge("vm_endpoints", "Endpoints of the VM's network stack, those in TIME_WAIT among them.", "vm")

	vmStalled = gauge("vm_stalled_seconds", "For how long frames have waited of which the guest takes none; 0 while it takes them.", "vm")

	linkFrames = counter("link_frames_total", "Frames that passed the VM's link; a super-frame is one."+perLife, "vm", "direction")
	linkBytes  = counter("link_bytes_total", "Bytes of frames that passed the VM's link."+perLife, "vm", "direction")
	drops      = counter("drops_total", "Frames dropped between the stack and the guest, by reason."+perLife, "vm", "reason")

	queueKicks    = counter("queue_kicks_total", "Times that the guest's driver woke us for a queue."+perLife, "vm", "queue", "direction")
	queuePolls    = counter("queue_polls_total", "Times that we found something new in a queue without being woken."+perLife, "vm", "queue", "direction")
	queueCalls    = counter("queue_calls_total", "Interrupts of the guest for a queue."+perLife, "vm", "queue", "direction")
	queueQuiet    = counter("queue_calls_suppressed_total", "Batches for which the guest's driver wanted no interrupt."+perLife, "vm", "queue", "direction")
	queueOffloads = counter("queue_offload_frames_total", "Frames that came without their checksum (checksum), and super-frames (segmentation), which have none either."+perLife,
		"vm", "queue", "direction", "offload")

	stackRetransmits = counter("stack_retransmits_total", "TCP segments sent again to the guest."+perLife, "vm")
	stackChecksums   = counter("stack_checksum_errors_total", "Packets of the guest with a wrong checksum or header."+perLife, "vm")
	stackReceive     = counter("stack_receive_drops_total", "Datagrams of the guest for which a flow had no room."+perLife, "vm")
	stackSegments    = counter("stack_segment_errors_total", "TCP segments that could not be sent, or were invalid."+perLife, "vm")
	stackResets      = counter("stack_resets_received_total", "TCP resets that the guest sent."+perLife, "vm")

	traceReaders = gauge("trace_readers", "Traces being read.")
	traceLost    = counter("trace_lost_records_total", "Frames that a trace lacks because its reader was too slow.")
	flightFrames = counter("flight_recorder_frames_total", "Frames kept by the VM's flight recorder, the last of which are there.", "vm")

	engineReachable = gauge("engine_reachable", "Whether the container engine answered last.", "vm")
	engineFailures  = gauge("engine_failures", "Listings of the container engine that failed, in a row.", "vm")
	engineListed    = gauge("engine_last_listing_timestamp_seconds", "When the container engine last said which containers run.", "vm")

	clusterReachable = gauge("cluster_reachable", "Whether the Kubernetes API server answered last.", "vm")
	clusterFailures  = gauge("cluster_failures", "Failures of the Kubernetes API server, in a row.", "vm")
	clusterGood      = gauge("cluster_last_good_timestamp_seconds", "When the Kubernetes API server last said which Services there are.", "vm")
	clusterWanted    = gauge("cluster_wanted", "Whether the cluster's ports are wanted: 0 after culvert kubernetes stop.", "vm")

	snapshots      = counter("reconcile_snapshots_total", "Statements of all that a source wants; vm is empty for the config and the CLI.", "vm", "source")
	snapshotsStale = counter("reconcile_stale_snapshots_total", "Statements of an earlier life of the VM, which were ignored.", "vm", "source")
	sourceFailures = counter("reconcile_source_failures_total", "Times that a source failed and was run again.", "vm", "source")
	lastSnapshot   = gauge("reconcile_last_snapshot_timestamp_seconds", "When a source last stated what it wants.", "vm", "source")
	publishes      = counter("reconcile_publishes_total", "Times that an owner's publishes were stated to the listeners.")
	withdrawals    = counter("reconcile_withdrawals_total", "Times that an owner was withdrawn.")
	resyncs        = counter("reconcile_resyncs_total", "Times that everything was stated again.")

	applySeconds = prometheus.NewDesc("culvert_reconcile_apply_duration_seconds",
		"How long it took to compare what is wanted with what there is, and to apply the difference.", nil, nil)

	namesCount = gauge("names", "Names in the zone.")
	dnsQueries = counter("dns_queries_total", "DNS queries answered, by response code.", "rcode")
)

// states are those that one of is 1.
var states = []reconcile.VMState{reconcile.VMWaiting, reconcile.VMReady, reconcile.VMStalled, reconcile.VMPaused, reconcile.VMGone}

// A collector is what the daemon shows of itself. It is a prometheus.Collector.
type collector struct {
	d   *Daemon
	dns *names.Server // nil where no names are served
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		ch <- f.desc
	}
	ch <- applySeconds
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	out := scrape(ch)
	out.put(buildInfo, 1, c.d.opts.Version, runtime.Version())
	c.ledger(out)
	for _, vm := range c.d.VMs() {
		out.vm(vm)
		if a := c.d.vm(vm.Name); a != nil {
			if l := a.current(); l != nil {
				out.link(vm, l)
			}
			c.guest(out, a, vm)
		}
	}
	c.reconcile(out)
	out.trace(c.d.tracer.Stats())
	if c.dns != nil {
		out.put(namesCount, float64(c.d.loop.Names().Len()))
		for rcode, n := range c.dns.Queries() {
			out.put(dnsQueries, float64(n), rcode)
		}
	}
}

// A scrape takes the metrics of one.
type scrape chan<- prometheus.Metric

func (s scrape) put(f family, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(f.desc, f.kind, v, labels...)
}

// at shows a time; one that never was is no series, as an age of it means
// nothing.
func (s scrape) at(f family, t time.Time, labels ...string) {
	if !t.IsZero() {
		s.put(f, float64(t.UnixNano())/1e9, labels...)
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (s scrape) directions(f family, t api.Traffic, labels ...string) {
	s.put(f, float64(t.ToGuest), append(labels[:len(labels):len(labels)], direction(true))...)
	s.put(f, float64(t.ToHost), append(labels[:len(labels):len(labels)], direction(false))...)
}

func direction(toGuest bool) string {
	if toGuest {
		return "to_guest"
	}
	return "to_host"
}

// ledger shows the rows, and what passes them.
func (c *collector) ledger(out scrape) {
	passed, rows := c.d.forwarder.Totals()
	for _, n := range c.d.loop.Notes() {
		rows[stack.RowsKey{VM: n.Owner.VM, Kind: n.Owner.Kind, State: n.State}]++
	}
	for _, v := range c.d.vms.Views() {
		for _, proto := range []listener.Proto{listener.TCP, listener.UDP} {
			if key := (stack.TotalsKey{VM: v.Name, Proto: proto}); passed[key] == nil {
				passed[key] = stack.NewTotals()
			}
		}
	}
	for k, n := range rows {
		out.put(listeners, float64(n), k.VM, k.Kind, k.State.String())
	}
	for k, t := range passed {
		proto := k.Proto.String()
		out.put(flows, float64(t.Active), k.VM, proto)
		out.put(flowsTotal, float64(t.Flows), k.VM, proto)
		out.directions(bytesTotal, api.Traffic{ToGuest: t.ToGuest, ToHost: t.ToHost}, k.VM, proto)
		for reason, n := range t.Refused {
			out.put(refusedTotal, float64(n), k.VM, proto, reason)
		}
		if k.Proto == listener.TCP {
			for end, n := range t.Ended {
				out.put(endedTotal, float64(n), k.VM, proto, end)
			}
		}
	}
}

// vm shows what the API says of a VM.
func (s scrape) vm(vm api.VM) {
	for _, state := range states {
		s.put(vmState, truth(vm.State == state.String()), vm.Name, state.String())
	}
	s.put(vmGeneration, float64(vm.Generation), vm.Name)
	s.put(vmProbeOK, truth(vm.Probe.OK), vm.Name)
	s.at(vmProbeAt, vm.Probe.At.Time, vm.Name)
	if vm.Probe.RTT > 0 {
		s.put(vmProbeRTT, vm.Probe.RTT, vm.Name)
	}
	s.at(vmLastFrame, vm.LastFrame.Time, vm.Name)
	s.put(vmQueues, float64(vm.Queues), vm.Name)
	s.put(vmEndpoints, float64(vm.Endpoints), vm.Name)
	for _, offload := range vm.Offloads {
		s.put(vmOffload, 1, vm.Name, offload)
	}
	if vm.Queues == 0 {
		return // nothing is attached
	}
	s.directions(linkFrames, vm.Frames, vm.Name)
	s.directions(linkBytes, vm.Bytes, vm.Name)
	for _, reason := range datapath.DropReasons() {
		s.put(drops, float64(vm.Drops[reason.String()]), vm.Name, reason.String())
	}
}

// link shows what the VM's stack knows beside that.
func (s scrape) link(vm api.VM, l *link) {
	n := l.Stats()
	s.put(vmStalled, l.Stalled().Seconds(), vm.Name)
	s.put(stackRetransmits, float64(n.Retransmits), vm.Name)
	s.put(stackChecksums, float64(n.ChecksumErrors), vm.Name)
	s.put(stackReceive, float64(n.ReceiveDrops), vm.Name)
	s.put(stackSegments, float64(n.SegmentsDropped), vm.Name)
	s.put(stackResets, float64(n.ResetsReceived), vm.Name)
	for _, q := range n.Link.Queues() {
		labels := []string{vm.Name, strconv.Itoa(q.Pair), direction(q.ToGuest)}
		s.put(queueKicks, float64(q.Kicks), labels...)
		s.put(queuePolls, float64(q.Polls), labels...)
		s.put(queueCalls, float64(q.Calls), labels...)
		s.put(queueQuiet, float64(q.Quiet), labels...)
		s.put(queueOffloads, float64(q.Partial), append(labels, "checksum")...)
		s.put(queueOffloads, float64(q.Super), append(labels, "segmentation")...)
	}
}

// trace shows who reads frames, and whether they can follow.
func (s scrape) trace(n trace.Stats) {
	s.put(traceReaders, float64(n.Readers))
	s.put(traceLost, float64(n.Lost))
	for vm, frames := range n.Flown {
		s.put(flightFrames, float64(frames), vm)
	}
}

// guest shows how it stands with what runs in a VM, as far as it is followed.
func (c *collector) guest(out scrape, a *attacher, vm api.VM) {
	if vm.Engine.Endpoint != "" {
		out.put(engineReachable, truth(vm.Engine.Reachable), vm.Name)
		out.put(engineFailures, float64(vm.Engine.Failures), vm.Name)
		out.at(engineListed, vm.Engine.Listed.Time, vm.Name)
	}
	if a.guest.config.Load().Kubernetes == (KubernetesConfig{}) {
		return
	}
	s := a.cluster()
	out.put(clusterReachable, truth(s.Reachable), vm.Name)
	out.put(clusterFailures, float64(s.Failures), vm.Name)
	out.at(clusterGood, s.LastGood, vm.Name)
	out.put(clusterWanted, truth(!c.d.loop.Held(vm.Name, reconcile.ServicesName)), vm.Name)
}

// cluster says how it stands with the VM's cluster; zero between lives.
func (a *attacher) cluster() reconcile.ServicesStatus {
	if s := a.guest.services.Load(); s != nil && a.current() != nil {
		return s.Status()
	}
	return reconcile.ServicesStatus{}
}

// reconcile shows what the loop has done.
func (c *collector) reconcile(out scrape) {
	n := c.d.loop.Stats()
	for _, s := range n.Sources {
		out.put(snapshots, float64(s.Snapshots), s.VM, s.Source)
		out.put(snapshotsStale, float64(s.Stale), s.VM, s.Source)
		out.put(sourceFailures, float64(s.Failures), s.VM, s.Source)
		out.at(lastSnapshot, s.Last, s.VM, s.Source)
	}
	out.put(publishes, float64(n.Published))
	out.put(withdrawals, float64(n.Withdrawn))
	out.put(resyncs, float64(n.Resyncs))
	buckets := make(map[float64]uint64, len(n.Applies.Buckets))
	for bound, took := range n.Applies.Buckets {
		buckets[bound.Seconds()] = took
	}
	out <- prometheus.MustNewConstHistogram(applySeconds, n.Applies.Count, n.Applies.Sum.Seconds(), buckets)
}
