package kube

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func convert(t *testing.T, text string) (Service, []string, bool) {
	t.Helper()
	var o object
	require.NoError(t, json.Unmarshal([]byte(text), &o))
	return o.service()
}

// The object is core/v1's: what the library writes is what is read.
func TestObjectReadsWhatTheLibraryWrites(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	vip, class := corev1.LoadBalancerIPModeVIP, "x"
	text, err := json.Marshal(corev1.Service{
		TypeMeta: metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "u-1", CreationTimestamp: metav1.NewTime(created),
			Annotations: map[string]string{"a": "b"}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class, LoadBalancerSourceRanges: []string{"10.9.0.0/16", "nonsense"},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080},
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}, {Protocol: corev1.ProtocolSCTP, Port: math.MaxUint16}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{IP: "10.0.2.2", IPMode: &vip}, {Hostname: "lb.example"}, {IP: "fd00::1", Hostname: "both"}}}},
	})
	require.NoError(t, err)
	s, left, ok := convert(t, string(text))
	require.True(t, ok)
	require.Empty(t, left)
	require.Equal(t, Service{
		Namespace: "ns", Name: "web", UID: "u-1", Created: created, LoadBalancer: true,
		Ports:        []Port{{"http", "TCP", 80, 30080}, {"dns", "UDP", 53, 0}, {"", "SCTP", math.MaxUint16, 0}},
		Ingress:      []Ingress{{IP: "10.0.2.2", Mode: "VIP"}, {Hostname: "lb.example"}, {IP: "fd00::1", Hostname: "both"}},
		SourceRanges: []string{"10.9.0.0/16", "nonsense"},
	}, s)
}

// FB-104: nothing of a Service of another type counts, whatever its status says.
func TestObjectOfAnotherTypeHasNothing(t *testing.T) {
	for _, kind := range []string{"ClusterIP", "NodePort", "ExternalName", "", "loadbalancer"} {
		s, _, ok := convert(t, `{"metadata":{"namespace":"d","name":"x"},"spec":{"type":"`+kind+`","ports":[{"port":80}]},
			"status":{"loadBalancer":{"ingress":[{"ip":"10.0.2.2"}]}}}`)
		require.True(t, ok)
		require.Equal(t, Service{Namespace: "d", Name: "x"}, s)
	}
}

// C-40: what is no name or no port number is left out, and said.
func TestObjectChecksNamesAndPorts(t *testing.T) {
	for _, name := range []string{"", "Web", "a.b", "a/b", "-a", "a-", "a b", "a\\n", strings.Repeat("a", 64), "ä"} {
		for _, text := range []string{`{"metadata":{"namespace":"d","name":"%s"}}`, `{"metadata":{"namespace":"%s","name":"d"}}`} {
			_, left, ok := convert(t, fmt.Sprintf(text, name))
			require.False(t, ok, name)
			require.Len(t, left, 1)
		}
	}
	s, left, ok := convert(t, `{"metadata":{"namespace":"d","name":"x"},"spec":{"type":"LoadBalancer","ports":[
		{"port":0},{"port":-1},{"port":65536},{"port":4294967377},{"port":80,"nodePort":70000},{"port":80,"nodePort":-1},{},
		{"port":80,"name":"a b"},{"port":80,"protocol":"T\u001b"},{"port":80,"protocol":"AAAAAAAAAAAAAAAAA"},
		{"port":1},{"port":65535,"protocol":"QUIC"}],"loadBalancerSourceRanges":["\u001b[31m"]},
		"status":{"loadBalancer":{"ingress":[{"ip":"a\nb"},{"hostname":"`+strings.Repeat("x", 300)+`"},{}]}}}`)
	require.True(t, ok)
	require.Equal(t, []Port{{Protocol: "TCP", Number: 1}, {Protocol: "QUIC", Number: 65535}}, s.Ports)
	require.Equal(t, []Ingress{{}}, s.Ingress)
	require.Equal(t, []string{"unreadable"}, s.SourceRanges, "a range that is none lets nobody in")
	require.Equal(t, []string{"10 ports with impossible numbers or names", "2 ingress entries that are no text"}, left)
}

func TestObjectBoundsItsLists(t *testing.T) {
	array := func(n int, entry string) string {
		return "[" + strings.TrimSuffix(strings.Repeat(entry+",", n), ",") + "]"
	}
	s, left, ok := convert(t, `{"metadata":{"namespace":"d","name":"x"},"spec":{"type":"LoadBalancer",
		"ports":`+array(10_000, `{"port":80}`)+`,"loadBalancerSourceRanges":`+array(10_000, `"10.0.0.0/8"`)+`},
		"status":{"loadBalancer":{"ingress":`+array(10_000, `{"ip":"10.0.2.2"}`)+`}}}`)
	require.True(t, ok)
	require.Len(t, s.Ports, maxPorts)
	require.Len(t, s.Ingress, maxIngress)
	require.Len(t, s.SourceRanges, maxSourceRanges)
	require.Equal(t, []string{"8976 ports too many", "9936 ingress entries too many", "9744 source ranges too many"}, left)
}

// What is left out is one debug line a Service, whatever its size.
func TestWhatIsLeftOutIsSaid(t *testing.T) {
	var log bytes.Buffer
	c := &Client{log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	var o object
	require.NoError(t, json.Unmarshal([]byte(`{"metadata":{"namespace":"d","name":"x"},"spec":{"type":"LoadBalancer","ports":[{}`+
		strings.Repeat(`,{"port":70000}`, 9_999)+`]}}`), &o))
	require.NotNil(t, c.service(&o))
	require.Equal(t, 1, strings.Count(log.String(), "\n"))
	require.Contains(t, log.String(), `level=DEBUG msg="left out of what the cluster says" namespace=d name=x left="1024 ports with impossible numbers or names, 8976 ports too many"`)
	log.Reset()
	o.Metadata.Name = "\x1b[31m"
	require.Nil(t, c.service(&o))
	require.Equal(t, 1, strings.Count(log.String(), "\n"))
	require.NotContains(t, log.String(), "\x1b")
}

// The memory of a Service is that of what is kept, not of what was sent.
func TestObjectOfManyEmptyPorts(t *testing.T) {
	text := []byte(`{"spec":{"ports":[{}` + strings.Repeat(",{}", maxValue/3-10) + `]}}`)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var o object
	require.NoError(t, json.Unmarshal(text, &o))
	runtime.ReadMemStats(&after)
	require.Len(t, o.Spec.Ports.list, maxPorts)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4*maxValue))
}

func TestSetCountsItsEntries(t *testing.T) {
	set := newSet()
	big := func(name string) *Service {
		return &Service{Namespace: "d", Name: name, Ports: make([]Port, maxPorts)}
	}
	n := maxEntries / (maxPorts + 1)
	for i := range n {
		require.NoError(t, set.put(big(fmt.Sprint(i))))
	}
	require.ErrorContains(t, set.put(big("more")), "more than 200000 ports and addresses of Services")
	require.NoError(t, set.put(big("0")), "one in place of another")
	for i := range n {
		set.remove(name{"d", fmt.Sprint(i)})
		set.remove(name{"d", fmt.Sprint(i)})
	}
	require.Zero(t, set.entries)
}

// Whatever the bytes are, what comes of them is a listing within bounds or an
// error.
func FuzzPage(f *testing.F) {
	f.Add([]byte(`{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"namespace":"d","name":"x"},"spec":{"type":"LoadBalancer","ports":[{"name":"a","port":80,"protocol":"TCP"}],"loadBalancerSourceRanges":["10.0.0.0/8"]},"status":{"loadBalancer":{"ingress":[{"ip":"1.2.3.4","ipMode":"VIP"}]}}}]}`))
	f.Add([]byte(`{"items":null,"kind":"ServiceList"}`))
	f.Add([]byte(`{"items":[7,[],{"spec":{"ports":{}}}],"kind":7}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		_, _ = newValues(strings.NewReader(string(text)), maxAnswer).page(func(o *object, err error) error {
			checkObject(t, o)
			return nil
		})
	})
}

// Whatever a watch says, each event is a change within bounds, nothing, or its
// end.
func FuzzWatch(f *testing.F) {
	f.Add([]byte(`{"type":"ADDED","object":{"metadata":{"namespace":"d","name":"x"},"spec":{"type":"LoadBalancer","ports":[{"port":80}]}}}{"type":"DELETED","object":{"metadata":{"namespace":"d","name":"x"}}}`))
	f.Add([]byte(`{"type":"BOOKMARK","object":{}}{"type":"ERROR","object":{"kind":"Status","code":410,"message":"\u001b"}}`))
	f.Add([]byte(`{"type":7}{"type":"ADDED","object":[[[`))
	f.Fuzz(func(t *testing.T, text []byte) {
		services := newSet()
		changes := make(chan change)
		fo := &follower{Client: &Client{log: discard}}
		ended := make(chan error, 1)
		go func() { ended <- fo.read(t.Context(), strings.NewReader(string(text)), changes) }()
		for c := range changes {
			require.NoError(t, c.apply(services))
		}
		require.Error(t, <-ended)
		for _, s := range services.all() {
			checkService(t, s)
		}
	})
}

func checkObject(t *testing.T, o *object) {
	if s, _, ok := o.service(); ok {
		checkService(t, s)
	}
}

func checkService(t *testing.T, s Service) {
	require.Regexp(t, `^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9]*[a-z0-9])?$`, s.Namespace+"/"+s.Name)
	require.LessOrEqual(t, len(s.Ports), maxPorts)
	require.LessOrEqual(t, len(s.Ingress), maxIngress)
	require.LessOrEqual(t, len(s.SourceRanges), maxSourceRanges)
	for _, p := range s.Ports {
		require.NotZero(t, p.Number)
		require.Regexp(t, `^[A-Z0-9]+$`, p.Protocol)
	}
	for _, i := range s.Ingress {
		require.True(t, plain(i.IP) && plain(i.Hostname) && plain(i.Mode))
	}
}
