package docker

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
)

// gauged reads text as the wire does.
func gauged(text []byte, max measure) ([]byte, error) {
	return io.ReadAll(&gauge{r: io.NopCloser(bytes.NewReader(text)), max: max})
}

// sound asserts what callers count on of every Container, whoever sent it.
func sound(t *testing.T, c Container) {
	t.Helper()
	for _, s := range []string{c.Name, c.Project, c.Service} {
		if len(s) > maxLabel || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '/' || r == '*' }) {
			t.Errorf("name %q", s)
		}
	}
	for _, a := range c.Addrs {
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() {
			t.Errorf("address %v", a)
		}
	}
	for _, b := range c.Bindings {
		if !slices.Contains(protocols, b.Proto) || b.Port == 0 || b.HostPort == 0 || b.HostIP.Zone() != "" || b.HostIP.Is4In6() {
			t.Errorf("binding %+v", b)
		}
	}
	for _, u := range c.Unusable {
		if u.Reason == "" || len(u.Reason) > 300 || strings.ContainsFunc(u.Reason, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("reason %q", u.Reason)
		}
	}
	again := c
	again.Bindings = slices.Clone(c.Bindings)
	again.tidy()
	if !slices.Equal(again.Bindings, c.Bindings) || len(slices.Compact(again.Bindings)) != len(c.Bindings) {
		t.Errorf("bindings are not sorted, or repeat: %+v", c.Bindings)
	}
}

func FuzzInspection(f *testing.F) {
	f.Add([]byte(`{"Id":"a","Name":"/web","State":{"Running":true,"StartedAt":"2026-11-30T09:20:10.178159809Z"},"Config":{"Labels":{"com.docker.compose.project":"shop"}},"HostConfig":{"NetworkMode":"default","PortBindings":{"80/tcp":[{"HostIp":"","HostPort":"8080"}]}},"NetworkSettings":{"Ports":{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"8080"},{"HostIp":"::1%lo","HostPort":"8080"}],"53/udp":null,"1-3":[{"HostIp":"x","HostPort":"1-3"}]},"Networks":{"bridge":{"IPAddress":"172.17.0.2","GlobalIPv6Address":"::ffff:1.2.3.4"},"none":null}}}`))
	f.Add([]byte(`{"HostConfig":{"PortBindings":{"80":[{"HostIp":7,"HostPort":8080}]}}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, text []byte) {
		text, err := gauged(text, inspection)
		var d detail
		if err != nil || json.Unmarshal(text, &d) != nil {
			return
		}
		sound(t, d.container())
	})
}

func FuzzListing(f *testing.F) {
	f.Add([]byte(`[{"Id":"a","Names":["/a/b","/web"],"Created":1796030404,"Ports":[{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":8080,"Type":"tcp"},{"PrivatePort":443,"Type":"tcp"},{"IP":"fe80::1%x","PrivatePort":1,"PublicPort":1,"Type":"TCP"}],"Labels":{"com.docker.compose.service":"web"},"State":"running","Status":"Up 3 seconds","HostConfig":{"NetworkMode":"default"},"NetworkSettings":{"Networks":{"bridge":{"EndpointID":"e","IPAddress":"172.17.0.2"},"x":null}}}]`))
	f.Add([]byte(`[{"Ports":[{"PrivatePort":0,"PublicPort":1,"Type":"\u001b"}]}]`))
	f.Fuzz(func(t *testing.T, text []byte) {
		text, err := gauged(text, listing)
		var all []container.Summary
		if err != nil || json.Unmarshal(text, &all) != nil {
			return
		}
		if len(all) > maxContainers {
			t.Fatalf("%d containers passed the gauge", len(all))
		}
		for i := range all {
			sound(t, fromListing(&all[i]))
			one, _ := appearance(&all[i])
			slices.Reverse(all[i].Ports)
			if two, _ := appearance(&all[i]); one != two {
				t.Error("the order of the ports is part of the look")
			}
		}
	})
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte(`{"Type":"container","Action":"start","Actor":{"ID":"` + strings.Repeat("a1", 32) + `"}}{"Type":"network","Action":"connect","Actor":{"Attributes":{"container":"x"}}}`))
	f.Add([]byte(`{"Type":"container","Action":"exec_start: sh"} null []`))
	f.Fuzz(func(t *testing.T, text []byte) {
		stream := json.NewDecoder(&gauge{r: io.NopCloser(bytes.NewReader(text)), max: eventMeasure})
		for {
			var m events.Message
			if stream.Decode(&m) != nil {
				return
			}
			if e, ok := event(m); ok && (e.ID != "" && !isID(e.ID) || e.Action == "") {
				t.Errorf("event %+v", e)
			}
		}
	})
}

// The gauge counts what is between strings, however the text is cut up, and
// begins anew with each document of a stream.
func TestGauge(t *testing.T) {
	small := measure{what: "a test", bytes: 40, objects: 2, values: 4, items: 3}
	for _, tt := range []struct {
		text, want string
	}{
		{`[1,2,3]`, ""},
		{`[1,2,3,4]`, "a test of more than 3 items"},
		{`[[1,2,3,4],5]`, ""},
		{`[[1,2,3,4],[5,6]]`, "a test of more than 4 values"},
		{`["{{{{,,,,,\"[[{{,,,"]`, ""},
		{`{"a":{"b":{}}}`, "a test of more than 2 objects"},
		{strings.Repeat(`{"a":{}}`, 20), ""},
		{strings.Repeat(" ", 41), "a test of more than 40 bytes"},
		{strings.Repeat("[", 41), "a test of more than 40 bytes"},
		{`"` + strings.Repeat("]", 41), "a test of more than 40 bytes"},
	} {
		for _, step := range []int{1, 3, 1000} {
			g := &gauge{r: io.NopCloser(&stepReader{[]byte(tt.text), step}), max: small}
			_, err := io.ReadAll(g)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("%s: %v", tt.text, err)
			case tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)):
				t.Errorf("%s: %v, not %s", tt.text, err, tt.want)
			}
			if _, again := g.Read(make([]byte, 1)); err != nil && again != err {
				t.Errorf("%s: it reads on after %v", tt.text, err)
			}
		}
	}
}

// A stepReader gives at most step bytes a time.
type stepReader struct {
	text []byte
	step int
}

func (r *stepReader) Read(p []byte) (int, error) {
	if len(r.text) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.text[:min(r.step, len(r.text))])
	r.text = r.text[n:]
	return n, nil
}

// Causes that a test as root, or on loopback, does not bring about.
func TestSentences(t *testing.T) {
	for text, want := range map[string]string{
		"dial unix /x: connect: permission denied":      "cannot be used: permission denied on its socket",
		"dial 10.0.2.2:2375: no route to host":          "cannot be reached: no route to it",
		"dial 10.0.2.2:2375: connection timed out":      "did not answer in time",
		"read tcp: connection reset by peer":            "closed the connection",
		"malformed HTTP response \"SSH-2.0-OpenSSH\"":   "does not speak HTTP",
		"net/http: TLS handshake timeout":               "did not answer in time",
		"write tcp: use of closed network connection":   "closed the connection",
		"something \x1b[2J else":                        `cannot be asked: something \x1b[2J else`,
		"remote error: tls: unknown certificate \x00 x": `refuses our certificate, or that there is none (unknown certificate \x00 x); see docker.tls.cert and docker.tls.key`,
	} {
		if got := unreached(textError(text), false).text; got != want {
			t.Errorf("%q: %s", text, got)
		}
	}
}

type textError string

func (e textError) Error() string { return string(e) }
