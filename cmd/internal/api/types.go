package api

import "time"

// A Listener is one line of the ledger: a publish and what became of it.
type Listener struct {
	Owner    Owner     `json:"owner"`
	Name     string    `json:"name"`     // what people call the owner: a container's name
	Protocol string    `json:"protocol"` // tcp | udp
	Host     string    `json:"host"`     // IP:PORT, or IP:FIRST-LAST for a range
	Bound    []string  `json:"bound"`    // as the kernel tells
	VM       string    `json:"vm"`
	Guest    string    `json:"guest"`
	State    string    `json:"state"` // pending | forwarded | skipped | failed
	Detail   string    `json:"detail"`
	RetryAt  Time      `json:"retryAt"`
	Source   string    `json:"source"` // gateway | client
	Flows    FlowCount `json:"flows"`
	Bytes    Traffic   `json:"bytes"`
	Since    Time      `json:"since"`
}

// An Owner is who asked for a publish.
type Owner struct {
	Kind string `json:"kind"` // config | cli | docker | kubernetes
	ID   string `json:"id"`
}

// FlowCount counts a publish's flows. Refused is all of Refusals together.
type FlowCount struct {
	Active   int               `json:"active"`
	Total    uint64            `json:"total"`
	Refused  uint64            `json:"refused"`
	Refusals map[string]uint64 `json:"refusals"` // by reason; empty, never null
}

// Traffic counts one thing in each direction.
type Traffic struct {
	ToGuest uint64 `json:"toGuest"`
	ToHost  uint64 `json:"toHost"`
}

// A Flow is one live flow.
type Flow struct {
	ID       uint64  `json:"id"`
	Protocol string  `json:"protocol"`
	Owner    Owner   `json:"owner"`
	VM       string  `json:"vm"`
	Client   string  `json:"client"`
	Host     string  `json:"host"`
	Source   string  `json:"source"` // as the guest sees it
	Guest    string  `json:"guest"`
	State    string  `json:"state"`
	Age      float64 `json:"age"`  // seconds
	Idle     float64 `json:"idle"` // seconds
	Bytes    Traffic `json:"bytes"`
}

// A VM is one virtual machine and its link.
type VM struct {
	Name       string            `json:"name"`
	Attach     string            `json:"attach"`
	State      string            `json:"state"` // waiting | ready | stalled | paused | gone
	Detail     string            `json:"detail"`
	Node       string            `json:"node"`
	Gateway    string            `json:"gateway"`
	Generation uint64            `json:"generation"`
	Offloads   []string          `json:"offloads"`
	Queues     int               `json:"queues"`
	TCP        string            `json:"tcp"` // what flows to the guest are: promoted | netstack; empty without a link
	LastFrame  Time              `json:"lastFrame"`
	Probe      Probe             `json:"probe"`
	Frames     Traffic           `json:"frames"`
	Bytes      Traffic           `json:"bytes"`
	Drops      map[string]uint64 `json:"drops"` // by reason; empty, never null
	Flows      int               `json:"flows"`
	Endpoints  int               `json:"endpoints"` // of the VM's stack, those in TIME_WAIT among them
	Engine     Engine            `json:"engine"`
	VMM        string            `json:"vmm"` // running | paused | shutdown | reset | lost, and perhaps " (WHY)"; empty when none is asked
	Since      Time              `json:"since"`
}

// An Engine is the container engine of a VM.
type Engine struct {
	Endpoint  string `json:"endpoint"` // empty when none is followed
	Reachable bool   `json:"reachable"`
	Detail    string `json:"detail"`   // why it is not
	Failures  int    `json:"failures"` // in a row
	Listed    Time   `json:"listed"`   // when it last said which containers run
}

// A Probe is the last question to the node through the datapath.
type Probe struct {
	OK  bool    `json:"ok"`
	At  Time    `json:"at"`
	RTT float64 `json:"rtt"` // seconds; of the last that was answered
}

// A Name is a name in the zone of names.
type Name struct {
	Name      string   `json:"name"`   // without the zone
	VM        string   `json:"vm"`     // of the owner it leads to
	Owners    []Owner  `json:"owners"` // the newest first, to which it leads
	Addresses []string `json:"addresses"`
}

// An Event is a change, one line of /v1/events.
type Event struct {
	At     Time   `json:"at"`
	Kind   string `json:"kind"` // vm.STATE | row.STATE | row.gone | engine.reachable, .unreachable | cluster.reachable, .unreachable
	VM     string `json:"vm"`
	Owner  Owner  `json:"owner"`
	Row    string `json:"row"` // HOST/PROTOCOL; empty for others than a row's
	Reason string `json:"reason"`
}

// A Step is one step on the way from a client of the host to a server in the
// guest, and what was found there when it was asked for.
type Step struct {
	VM     string `json:"vm"`
	Row    string `json:"row"`   // HOST/PROTOCOL; empty for what all rows of a VM share
	Step   string `json:"step"`  // host socket | listener | vm | link | node | engine | cluster | guest port | container | service
	State  string `json:"state"` // ok | broken | skipped: not looked at, the detail says why | unknown: looked at, and it cannot be told
	Detail string `json:"detail"`
	Advice string `json:"advice"` // what to do about one that is broken
}

// A PublishRequest is the body of PUT and DELETE /v1/publishes. VM may be empty
// while there is one VM.
type PublishRequest struct {
	VM      string   `json:"vm"`
	Publish []string `json:"publish"`
}

// A Kubernetes is the cluster in one VM and its Services of type LoadBalancer.
type Kubernetes struct {
	VM       string        `json:"vm"`
	API      ClusterAPI    `json:"api"`
	Wanted   bool          `json:"wanted"`   // false after a KubernetesRequest said so
	Failures int           `json:"failures"` // of the API server, in a row
	Ports    []ServicePort `json:"ports"`    // by namespace, name, port; empty, never null
}

// A ClusterAPI is a cluster's API server.
type ClusterAPI struct {
	Endpoint  string `json:"endpoint"` // its URL
	Reachable bool   `json:"reachable"`
	Detail    string `json:"detail"` // why it is not reachable
}

// A ServicePort is one port of a Service and what became of it.
type ServicePort struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Port      uint16 `json:"port"`
	Protocol  string `json:"protocol"` // as the cluster says it: TCP, UDP, SCTP
	Host      string `json:"host"`     // IP:PORT
	State     string `json:"state"`    // pending | forwarded | skipped | failed
	Detail    string `json:"detail"`
	RetryAt   Time   `json:"retryAt"`
}

// A KubernetesRequest is the body of PUT /v1/kubernetes: whether a cluster's
// ports are wanted. VM may be empty while one VM has a cluster.
type KubernetesRequest struct {
	VM     string `json:"vm"`
	Wanted bool   `json:"wanted"`
}

// A Problem is an error as the API states it (RFC 9457). It is an error of the
// client's calls.
type Problem struct {
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
}

func (p *Problem) Error() string { return p.Detail }

// A Time is RFC 3339 in JSON, and an empty string when zero.
type Time struct{ time.Time }

// MarshalJSON implements json.Marshaler.
func (t Time) MarshalJSON() ([]byte, error) {
	if t.IsZero() {
		return []byte(`""`), nil
	}
	return []byte(`"` + t.UTC().Format(time.RFC3339Nano) + `"`), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Time) UnmarshalJSON(b []byte) error {
	if string(b) == `""` {
		t.Time = time.Time{}
		return nil
	}
	return t.Time.UnmarshalJSON(b)
}
