package attach

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseSpec(t *testing.T) {
	for in, want := range map[string]Spec{
		"qemu:unix:/run/vm.sock":       {Transport: QEMU, Network: "unix", Address: "/run/vm.sock"},
		"qemu:unix:/run/a:b=c,dial":    {Transport: QEMU, Network: "unix", Address: "/run/a:b=c", Dial: true},
		"qemu:tcp:127.0.0.1:5000":      {Transport: QEMU, Network: "tcp", Address: "127.0.0.1:5000"},
		"qemu:tcp:[::1]:5000,dial":     {Transport: QEMU, Network: "tcp", Address: "[::1]:5000", Dial: true},
		"qemu:tcp:vm-1.lan:1":          {Transport: QEMU, Network: "tcp", Address: "vm-1.lan:1"},
		"qemu:tcp:0.0.0.0:65535":       {Transport: QEMU, Network: "tcp", Address: "0.0.0.0:65535"},
		"qemu:tcp:[fe80::1%eth0]:9":    {Transport: QEMU, Network: "tcp", Address: "[fe80::1%eth0]:9"},
		"unixgram:/run/vm.sock":        {Transport: Unixgram, Address: "/run/vm.sock"},
		"vhost-user:/run/vm.sock":      {Transport: VhostUser, Address: "/run/vm.sock", Queues: 1},
		"vhost-user:/v,queues=2":       {Transport: VhostUser, Address: "/v", Queues: 2},
		"tap:tap0":                     {Transport: Tap, Address: "tap0", Queues: 1},
		"tap:t,netns=/run/netns/vm":    {Transport: Tap, Address: "t", NetNS: "/run/netns/vm", Queues: 1},
		"tap:abcdefghijklmno,queues=2": {Transport: Tap, Address: "abcdefghijklmno", Queues: 2},
		"tap:t,netns=/n,queues=16":     {Transport: Tap, Address: "t", NetNS: "/n", Queues: 16},
		"packet:eth0,netns=/n":         {Transport: Packet, Address: "eth0", NetNS: "/n"},
		"memory":                       {Transport: Memory},
	} {
		t.Run(in, func(t *testing.T) {
			got, err := ParseSpec(in)
			require.NoError(t, err)
			assert.Equal(t, want, got)
			assert.Equal(t, in, got.String(), "the one form")
		})
	}
}

func TestParseSpecOneForm(t *testing.T) {
	for in, want := range map[string]string{
		"tap:t,queues=1":           "tap:t",
		"tap:t,queues=02,netns=/n": "tap:t,netns=/n,queues=2",
		"qemu:tcp:[10.0.0.1]:080":  "qemu:tcp:10.0.0.1:80",
	} {
		got, err := ParseSpec(in)
		require.NoError(t, err)
		assert.Equal(t, want, got.String())
	}
}

// TestParseSpecRefuses: each error quotes the offending part and says what is
// expected.
func TestParseSpecRefuses(t *testing.T) {
	for in, says := range map[string][]string{
		"":                          {`transport ""`, "qemu:unix:PATH", "tap:IFNAME", "memory"},
		"quemu:unix:/x":             {`"quemu"`, "qemu:unix:PATH"},
		"/run/vm.sock":              {`"/run/vm.sock"`, "qemu:unix:PATH"},
		"qemu":                      {`""`, "unix:PATH or tcp:HOST:PORT"},
		"qemu:/run/vm.sock":         {`"/run/vm.sock"`, "unix:PATH or tcp:HOST:PORT"},
		"qemu:unix:":                {"path is missing"},
		"qemu:unix:vm.sock":         {`"vm.sock"`, "relative", "absolute"},
		"qemu:unix:@vm":             {`"@vm"`, "absolute"},
		"qemu:unix:/run/":           {`"/run/"`, "a file's"},
		"qemu:unix:/a\x00b":         {"NUL"},
		"qemu:unix:/a,b":            {`"b"`, "want dial"},
		"qemu:unix:/a,dial=yes":     {`"dial=yes"`, "want dial"},
		"qemu:unix:/a,":             {`option ""`, "want dial"},
		"qemu:unix:/a,dial,dial":    {`"dial" twice`},
		"qemu:unix:/a,queues=2":     {`"queues=2"`, "want dial"},
		"qemu:tcp:127.0.0.1":        {`"127.0.0.1"`, "HOST:PORT"},
		"qemu:tcp:::1:5000":         {`"::1:5000"`, "[::1]:5000"},
		"qemu:tcp::5000":            {`host ""`, "127.0.0.1 is this machine"},
		"qemu:tcp:a b:5000":         {`host "a b"`},
		"qemu:tcp:h:0":              {`port "0"`, "1 to 65535"},
		"qemu:tcp:h:65536":          {`port "65536"`, "1 to 65535"},
		"qemu:tcp:h:http":           {`port "http"`},
		"unixgram":                  {"path is missing"},
		"unixgram:/a,dial":          {`"dial"`, "takes none"},
		"vhost-user:/a,queues=0":    {`"queues=0"`, `"0"`, "1 to 16"},
		"tap:":                      {"name is missing"},
		"tap:abcdefghijklmnop":      {`"abcdefghijklmnop"`, "16 bytes", "at most 15"},
		"tap:a/b":                   {`"a/b"`},
		"tap:tap%d":                 {`"tap%d"`},
		"tap:..":                    {`".."`},
		"tap:t,queues=17":           {`"queues=17"`, `"17"`, "1 to 16"},
		"tap:t,queues":              {`"queues"`, "queues=N"},
		"tap:t,queues=-1":           {`"-1"`},
		"tap:t,queues=2,queues=2":   {`"queues" twice`},
		"tap:t,netns=vm":            {`"vm"`, "absolute"},
		"tap:t,netns=":              {"path is missing"},
		"tap:t,mtu=9000":            {`"mtu=9000"`, "netns=PATH or queues=N"},
		"packet:eth0,queues=2":      {`"queues=2"`, "want netns=PATH"},
		"memory:x":                  {`"x"`, "want nothing"},
		"memory,dial":               {`"dial"`, "takes none"},
		"unixgram:/a,constructor=1": {`"constructor=1"`},
	} {
		t.Run(in, func(t *testing.T) {
			spec, err := ParseSpec(in)
			require.Error(t, err)
			assert.Zero(t, spec)
			for _, s := range append(says, "attach spec") {
				assert.ErrorContains(t, err, s)
			}
		})
	}
}

// TestFB170PathTooLong: 107 bytes are taken; 108 are refused before anything is
// started, with the limit named.
func TestFB170PathTooLong(t *testing.T) {
	for _, prefix := range []string{"qemu:unix:", "unixgram:", "vhost-user:"} {
		for _, n := range []int{107, 108, 120} {
			path := "/" + strings.Repeat("x", n-1)
			_, err := ParseSpec(prefix + path)
			if n <= 107 {
				assert.NoError(t, err)
				continue
			}
			require.ErrorContains(t, err, path)
			assert.ErrorContains(t, err, "at most 107")
		}
	}
}

func FuzzParseSpec(f *testing.F) {
	for _, s := range []string{
		"qemu:unix:/run/vm.sock,dial", "qemu:tcp:[::1]:5000", "qemu:tcp:[fe80::1%a]:1", "unixgram:/a", "vhost-user:/a,queues=3",
		"tap:tap0,netns=/run/netns/x,queues=2", "packet:eth0,netns=/n", "memory", "tap:a\xff", "qemu:tcp:a:00001,dial", ",,", ":::",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		spec, err := ParseSpec(s)
		if err != nil {
			require.Zero(t, spec)
			return
		}
		require.NotZero(t, spec)
		again, err := ParseSpec(spec.String())
		require.NoError(t, err, "%q", spec.String())
		require.Equal(t, spec, again)
		require.Equal(t, spec.String(), again.String())
	})
}
