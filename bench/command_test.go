package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkPublishCommand has a daemon, a process of its own, publish 10 000 single
// ports by one `culvert publish`, and take them back by one `culvert unpublish`: how
// long a person waits, from the command's start to its end, and what the ports cost
// the daemon in memory, garbage included. Beside them single ports come and go by a
// request of its API each.
func BenchmarkPublishCommand(b *testing.B) {
	const ports, singles, from = 10_000, 100, 20_000
	b.Run(fmt.Sprintf("path=culvert/ports=%d", ports), func(b *testing.B) {
		if n := maxFDs(b); n < ports+100 {
			leaveOut(b, fmt.Sprintf("a process may have %d descriptors", n))
		}
		texts := make([]string, ports)
		for i := range texts {
			texts[i] = own(from + i)
		}
		var publish, withdraw, memory, one, oneBack float64
		for b.Loop() {
			d := startDaemon(b, "")
			d.await(b, "vms", 1, `"state": "ready"`)
			time.Sleep(time.Second) // what starting took is given back
			empty := processes{d.pid}.resident(b)
			publish += ms(d.command(b, "publish", "forwarded", texts...))
			memory += float64(processes{d.pid}.resident(b)-empty) / 1e6

			api := d.client(b)
			came, went := make([]time.Duration, singles), make([]time.Duration, singles)
			for i := range came {
				came[i] = request(b, api, http.MethodPut, own(from+ports+i))
				went[i] = request(b, api, http.MethodDelete, own(from+ports+i))
			}
			one += median(came)
			oneBack += median(went)
			withdraw += ms(d.command(b, "unpublish", "gone", texts...))
		}
		b.ReportMetric(publish/float64(b.N), "publish-ms")
		b.ReportMetric(memory/float64(b.N), "MB")
		b.ReportMetric(one/float64(b.N), "one-more-p50-µs")
		b.ReportMetric(withdraw/float64(b.N), "withdraw-ms")
		b.ReportMetric(oneBack/float64(b.N), "one-less-p50-µs")
		b.ReportMetric(0, "ns/op")
	})
}

// command publishes or unpublishes texts by one command, after which each is in
// state, and returns how long it took.
func (d *daemon) command(b *testing.B, name, state string, texts ...string) time.Duration {
	b.Helper()
	cmd := exec.Command(d.binary, append([]string{"--api", d.api, name, "-o", "json"}, texts...)...)
	start := time.Now()
	out, err := cmd.Output()
	took := time.Since(start)
	require.NoError(b, err)
	var rows []struct{ State string }
	require.NoError(b, json.Unmarshal(out, &rows))
	require.Len(b, rows, len(texts))
	for i, r := range rows {
		require.Equal(b, state, r.State, texts[i])
	}
	return took
}

// client returns one of the daemon's API.
func (d *daemon) client(b *testing.B) *http.Client {
	b.Helper()
	t := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.api)
	}}
	b.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t}
}

// request publishes (PUT) or unpublishes (DELETE) text by a daemon's API, which
// answers with its forwarded row, and returns how long it took.
func request(b *testing.B, api *http.Client, method, text string) time.Duration {
	b.Helper()
	body := strings.NewReader(fmt.Sprintf(`{"publish":[%q]}`, text))
	req, err := http.NewRequestWithContext(b.Context(), method, "http://culvert/v1/publishes", body)
	require.NoError(b, err)
	start := time.Now()
	resp, err := api.Do(req)
	require.NoError(b, err)
	defer resp.Body.Close()
	said, err := io.ReadAll(resp.Body)
	took := time.Since(start)
	require.NoError(b, err)
	require.Equal(b, http.StatusOK, resp.StatusCode, "%s", said)
	require.Equal(b, 1, strings.Count(string(said), `"state":"forwarded"`), "%s", said)
	return took
}
