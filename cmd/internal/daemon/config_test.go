package daemon

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var over = Overrides{APISocket: "/run/culvert/culvert.sock"}

func TestConfigDefaults(t *testing.T) {
	c, err := ParseConfig("c.yaml", []byte("vms:\n- attach: qemu:unix:/tmp/vm.sock\n"), over)
	require.NoError(t, err)
	assert.Equal(t, "/run/culvert/culvert.sock", c.API)
	assert.False(t, c.ExposeToLAN)
	assert.Equal(t, Timeouts{3 * time.Second, time.Hour, 90 * time.Second, 5 * time.Second, 30 * time.Second}, c.Timeouts)
	assert.Equal(t, Limits{8 << 20, 1 << 30, 65536, 16384}, c.Limits)
	require.Len(t, c.VMs, 1)
	assert.Equal(t, "default", c.VMs[0].Name)
	assert.Equal(t, "10.0.2.2", c.VMs[0].Node.String())
	assert.Equal(t, "10.0.2.1/24", c.VMs[0].Gateway.String())
	assert.Equal(t, 1500, c.VMs[0].MTU)
	assert.Equal(t, tcpPromoted, c.VMs[0].TCP)
}

// TestConfigEmpty is a file that says nothing, in each way there is.
func TestConfigEmpty(t *testing.T) {
	for _, text := range []string{"", "\n", "# nothing\n", "---\n", "timeouts:\n", "vms: []\n"} {
		c, err := ParseConfig("c.yaml", []byte(text), over)
		require.NoError(t, err, "%q", text)
		assert.Empty(t, c.VMs)
		assert.Equal(t, 65536, c.Limits.Flows)
	}
}

func TestConfigWhole(t *testing.T) {
	c, err := ParseConfig("c.yaml", []byte(`
api: /tmp/c.sock
exposeToLAN: true
log: {level: debug, format: json}
timeouts: {connect: 1s, halfClose: 10m, udpIdle: 2s, drain: 1s, bindRetry: 5s}
limits: {flowBuffer: 64KiB, totalBuffers: 2MiB, flows: 10, udpFlows: 20}
trace: {flightRecorder: 5000}
vms:
  - name: one
    attach: tap:tap0,netns=/run/netns/x
    node: 198.18.0.2
    gateway: 198.18.0.1/30
    mtu: 9000
    tcp: netstack
    publish: ["8080:80", "127.0.0.1:2222:22"]
publish: ["53:53/udp"]
`), over)
	require.NoError(t, err)
	assert.Equal(t, Limits{64 << 10, 2 << 20, 10, 20}, c.Limits)
	assert.Equal(t, LogConfig{"debug", "json"}, c.Log)
	assert.Equal(t, TraceConfig{FlightRecorder: 5000}, c.Trace)
	assert.Equal(t, tcpNetstack, c.VMs[0].TCP)
	require.Len(t, c.specs(), 3)
	for _, s := range c.specs() {
		assert.Equal(t, "one", s.Target.VM)
	}
	assert.Equal(t, "53:53/udp", c.specs()[2].String())
}

func TestConfigGuest(t *testing.T) {
	c, err := ParseConfig("c.yaml", []byte(`
vms:
  - attach: memory
    qmp: /run/q.sock
    docker: tcp://10.0.2.2:2375
    kubernetes: {kubeconfig: /etc/k3s.yaml}
  - name: two
    attach: memory
    docker: {endpoint: "tcp://10.0.2.2:2376", tls: {ca: /ca, cert: /cert, key: /key}}
    kubernetes: {kubeconfig: /k, via: host, reach: nodeport}
names: {listen: "[::1]:53", zone: Example.Internal., address: loopback, unknown: nodata, upstreams: [192.0.2.1, "[2001:db8::1]:5353"]}
`), over)
	require.NoError(t, err)
	assert.Equal(t, "/run/q.sock", c.VMs[0].QMP)
	assert.Equal(t, VMGuest{DockerConfig{Endpoint: "tcp://10.0.2.2:2375"}, KubernetesConfig{"/etc/k3s.yaml", "stack", "auto"}}, c.VMs[0].VMGuest)
	assert.Equal(t, VMGuest{DockerConfig{"tcp://10.0.2.2:2376", "/ca", "/cert", "/key"}, KubernetesConfig{"/k", "host", "nodeport"}}, c.VMs[1].VMGuest)
	assert.Equal(t, NamesConfig{
		netip.MustParseAddrPort("[::1]:53"), "example.internal", "loopback", "nodata", "192.0.2.1:53,[2001:db8::1]:5353",
	}, c.Names)
}

// Names are served where the defaults say once there is an engine.
func TestConfigNamesDefault(t *testing.T) {
	for text, want := range map[string]NamesConfig{
		"vms: [{attach: memory}]": {},
		"vms: [{attach: memory, docker: 'unix:///d'}]\nnames: {listen: ''}": {},
		"vms: [{attach: memory, docker: 'unix:///d'}]":                      {netip.MustParseAddrPort("127.0.0.1:5553"), "culvert.internal", "host", "nxdomain", ""},
		"names: {listen: '127.0.0.1:53'}":                                   {netip.MustParseAddrPort("127.0.0.1:53"), "culvert.internal", "host", "nxdomain", ""},
	} {
		c, err := ParseConfig("c.yaml", []byte(text), over)
		require.NoError(t, err)
		assert.Equal(t, want, c.Names, text)
	}
}

func TestConfigOverrides(t *testing.T) {
	o := Overrides{APISocket: "/tmp/o.sock", ForceAPI: true, Attach: []string{"a=memory"}, Publish: []string{"8080:80"}}
	c, err := ParseConfig("command line", nil, o)
	require.NoError(t, err)
	assert.Equal(t, "/tmp/o.sock", c.API)
	assert.Equal(t, "a", c.VMs[0].Name)
	assert.Len(t, c.specs(), 1)
	c, err = ParseConfig("c.yaml", []byte("api: /tmp/file.sock\n"), o)
	require.NoError(t, err)
	assert.Equal(t, "/tmp/o.sock", c.API)
}

// TestConfigErrors holds each error to its place and its sentence: "line:col"
// and a part of the text.
func TestConfigErrors(t *testing.T) {
	long := "/" + strings.Repeat("x", 107)
	for _, c := range []struct{ text, at, want string }{
		{"nonsense: 1", "1:1", "unknown field"},
		{"vms:\n- atach: memory", "2:3", "unknown field"},
		{"exposeToLAN: perhaps", "1:14", "true or false is wanted here, not a text"},
		{"limits: {flows: many}", "1:17", "not a whole number"},
		{"timeouts: {connect: soon}", "1:21", "not a positive duration"},
		{"timeouts: {connect: 0s}", "1:21", "not a positive duration"},
		{"timeouts: {drain: -1s}", "1:19", "not a positive duration"},
		{"limits: {flowBuffer: 8MB}", "1:22", "not a size"},
		{"limits: {flowBuffer: 1KiB}", "1:22", "less than 64KiB"},
		{"limits: {totalBuffers: 1MiB}", "1:24", "less than limits.flowBuffer, \"8MiB\""},
		{"trace: {flightRecorder: -1}", "1:25", "no number of frames from 0 to 1000000"},
		{"trace: {flightRecorder: 1000001}", "1:25", "no number of frames"},
		{"trace: {flightRecorder: yes}", "1:25", "no number of frames"},
		{"limits: {flows: 0}", "1:17", "not a whole number"},
		{"limits: {udpFlows: 1.5}", "1:20", "not a whole number"},
		{"limits: {flowBuffer: 2GiB, totalBuffers: 4GiB}", "1:22", "more than 1GiB"},
		{"api: [a]", "1:6", "a text is wanted here, not a list"},
		{"vms: {name: a}", "1:6", "a list is wanted here, not a mapping"},
		{"api: /a\napi: /b", "2:1", "already defined"},
		{"api: /a\n---\napi: /b", "3:4", "second document"},
		{"publish: ['1:1']", "1:11", "there is no VM"},
		{"vms:\n- {attach: memory, mtu: 1500.5}", "2:25", "not a whole number"},
		{"log: {level: loud}", "1:14", "none of debug"},
		{"log: {format: xml}", "1:15", "neither text nor json"},
		{"api: " + long, "1:6", "at most 107"},
		{"vms:\n- name: a", "2:7", "no attach spec"},
		{"vms:\n- {name: 'a b', attach: memory}", "2:10", "not a VM's name"},
		{"vms:\n- {attach: memory}\n- {attach: memory, name: default}", "3:26", "already"},
		{"vms:\n- {attach: memory}\n- {attach: memory}", "3:3", "give this one a name"},
		{"vms:\n- attach: memory\n- attach: memory", "3:9", "give this one a name"},
		{"vms:\n- {attach: 'tap:a'}\n- {name: b, attach: 'tap:a,queues=2'}", "3:21", `VM "default" is attached to a already`},
		{"vms:\n- {attach: 'qemu:unix:/s'}\n- {name: b, attach: 'qemu:unix:/s,dial'}", "3:21", "each VM has its own"},
		{"vms:\n- {attach: memory, publish: '80:80'}", "2:29", "a list is wanted here, not a text"},
		{"vms:\n- {attach: memory, publish: {80: 80}}", "2:29", "a list is wanted here, not a mapping"},
		{"vms:\n- {attach: memory, publish: 80}", "2:29", "a list is wanted here, not a number"},
		{"vms:\n- {attach: memory, kubernetes: /k}", "2:32", "a mapping is wanted here, not a text"},
		{"vms:\n- attach: memory\n\tmtu: 1500", "3:1", "use spaces"},
		{"vms:\n- attach: floppy:a", "2:11", "floppy"},
		{"vms:\n- attach: tap:interface-too-long", "2:11", "15"},
		{"vms:\n- attach: qemu:unix:" + long, "2:11", "107"},
		{"vms:\n- {attach: memory, node: 10.0.2.300}", "2:26", "not an IPv4 address"},
		{"vms:\n- {attach: memory, node: 10.0.3.2}", "2:26", "not in the gateway's network"},
		{"vms:\n- {attach: memory, node: 10.0.2.1}", "2:26", "both"},
		{"vms:\n- {attach: memory, node: 10.0.2.255}", "2:26", "broadcast"},
		{"vms:\n- {attach: memory, gateway: 10.0.2.1}", "2:29", "prefix length"},
		{"vms:\n- {attach: memory, mtu: 100}", "2:25", "between 576 and 65520"},
		{"vms:\n- {attach: memory, mtu: 65521}", "2:25", "between"},
		{"vms:\n- {attach: memory, tcp: fast}", "2:25", "none of promoted, netstack"},
		{"vms:\n- {attach: memory, docker: 'tcp://x'}", "2:28", "an IP address and a port"},
		{"vms:\n- {attach: memory, docker: 'tcp://127.0.0.1:2375'}", "2:28", "guest's own loopback"},
		{"vms:\n- {attach: memory, docker: {endpoint: 'http://10.0.2.2:2375'}}", "2:39", "not tcp or unix"},
		{"vms:\n- {attach: memory, docker: {tls: {ca: /x}}}", "2:28", "tcp://IP:PORT or unix:///PATH"},
		{"vms:\n- {attach: memory, docker: {endpoint: 'unix://relative'}}", "2:39", "absolute path of a socket"},
		{"vms:\n- {attach: memory, docker: {endpoint: 'unix:///s', tls: {ca: /x}}}", "2:57", "speaks no TLS"},
		{"vms:\n- {attach: memory, docker: {endpoint: 'tcp://10.0.2.2:2376', tls: {cert: /x}}}", "2:67", "both cert and key"},
		{"vms:\n- {attach: memory, docker: {endpont: 'tcp://10.0.2.2:2375'}}", "2:29", "unknown field"},
		{"vms:\n- {attach: memory, docker: {endpoint: 'unix://" + long + "'}}", "2:39", "at most 107"},
		{"vms:\n- {attach: memory, qmp: " + long + "}", "2:25", "at most 107"},
		{"vms:\n- {attach: memory, kubernetes: {via: stack}}", "2:32", "names no kubeconfig"},
		{"vms:\n- {attach: memory, kubernetes: {kubeconfig: /k, via: air}}", "2:54", "neither stack nor host"},
		{"vms:\n- {attach: memory, kubernetes: {kubeconfig: /k, reach: far}}", "2:56", "neither auto nor nodeport"},
		{"names: {listen: nowhere}", "1:17", "not an IP address and port"},
		{"names: {zone: 'a b'}", "1:15", "no name for DNS"},
		{"names: {address: moon}", "1:18", "neither host nor loopback"},
		{"names: {unknown: perhaps}", "1:18", "neither nxdomain nor nodata"},
		{"names: {upstreams: [dns.example]}", "1:21", "is no address"},
		{"names: {upstreams: ['127.0.0.1:5553']}", "1:21", "names.listen itself"},
		{"names: {port: 53}", "1:9", "unknown field"},
		{"vms:\n- attach: memory\n  publish: ['8080:80', '8081:99999']", "3:24", "99999"},
		{"vms:\n- {attach: memory}\n- {attach: memory, name: b}\npublish: ['8080:80']", "4:11", "names no VM"},
		{"vms: [", "1:6", ""},
	} {
		t.Run(c.text, func(t *testing.T) {
			_, err := ParseConfig("c.yaml", []byte(c.text), over)
			require.Error(t, err)
			assert.Contains(t, err.Error(), c.want)
			assert.True(t, strings.HasPrefix(err.Error(), "c.yaml:"+c.at+":"), "%v", err)
			assert.Contains(t, err.Error(), "^", "a caret")
		})
	}
	for _, o := range []Overrides{
		{APISocket: "/x", Attach: []string{"memory"}},
		{APISocket: "/x", Attach: []string{"a b=memory"}},
		{APISocket: "/x", Attach: []string{"a=floppy"}},
		{APISocket: "/x", Attach: []string{"a=memory", "a=memory"}},
		{APISocket: "/x", Publish: []string{"8080:80"}},
		{APISocket: "/x", Attach: []string{"a=memory"}, Publish: []string{"65536:80"}},
		{APISocket: ""},
	} {
		_, err := ParseConfig("command line", nil, o)
		assert.Error(t, err, "%+v", o)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte("vms:\n- attach: memory\n  publish: ['8080:80']\n"))
	f.Add([]byte("limits: {flowBuffer: 8MiB}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseConfig("c.yaml", text, over)
		if (c == nil) == (err == nil) {
			t.Fatalf("both or neither: %v, %v", c, err)
		}
	})
}
