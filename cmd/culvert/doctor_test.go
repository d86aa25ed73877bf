package main

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestDoctorBroken: a broken step is marked with what to do, and the exit code
// says so, in both formats.
func TestDoctorBroken(t *testing.T) {
	socket := serveFake(t)
	out, errs, code := cli(t, "--api", socket, "doctor")
	assert.Equal(t, exitFailed, code)
	assert.Equal(t, "culvert: broken: VM default: node\n", errs)
	golden(t, "doctor", out)

	out, _, code = cli(t, "--api", socket, "doctor", "-o", "json")
	assert.Equal(t, exitFailed, code)
	var steps []api.Step
	require.NoError(t, json.Unmarshal([]byte(out), &steps))
	golden(t, "doctor-json", out)
}

// TestDoctorNarrow: what does not fit a terminal goes on below where it began, and
// no word is lost.
func TestDoctorNarrow(t *testing.T) {
	steps := []api.Step{
		{VM: "default", Step: "node", State: "broken", Detail: "10.0.2.2 does not answer ARP: asked 2 times, 1.5s each", Advice: "in the guest, on culvert's interface: ip link set IFACE up arp on; or the guest hangs"},
		{Row: "127.0.0.1:8080/tcp", Step: "host socket", State: "ok", Detail: "the kernel has the daemon's at 127.0.0.1:8080 and [::1]:8080"},
	}
	const indent = len("127.0.0.1:8080/tcp   host socket   broken   ")
	words := func(width int) (all []string) {
		lines := strings.Split(strings.TrimSuffix(stepsText(steps, width, false), "\n"), "\n")
		assert.Greater(t, len(lines), 3+3, "some are broken")
		for _, line := range lines[1:] {
			assert.LessOrEqual(t, utf8.RuneCountInString(line), max(width, indent+leastDetail), line)
			require.Greater(t, len(line), indent)
			assert.Equal(t, byte(' '), line[indent-1])
			all = append(all, strings.Fields(line[indent:])...)
		}
		return all
	}
	want := strings.Fields(steps[0].Detail + " → " + steps[0].Advice + " " + steps[1].Detail)
	for _, width := range []int{20, 40, 70, 80, 90} {
		assert.Equal(t, want, words(width), width)
	}
	assert.Contains(t, stepsText(steps, 80, false), "\n"+strings.Repeat(" ", indent)+"→ in the guest, on culvert's")
	assert.Contains(t, stepsText(steps, 80, false), "\n"+strings.Repeat(" ", indent)+"  interface: ip link set")
	assert.Len(t, strings.Split(stepsText(steps, 0, false), "\n"), 1+2+1+1, "a file has a line each")
}

func TestBrokenStepsAreFew(t *testing.T) {
	steps := make([]api.Step, 100)
	for i := range steps {
		steps[i] = api.Step{Row: "a", Step: "guest port", State: "broken"}
	}
	assert.EqualError(t, brokenSteps(steps), "broken: a: guest port, a: guest port, a: guest port, 97 more")
	assert.NoError(t, brokenSteps([]api.Step{{State: "ok"}, {State: "skipped"}, {State: "unknown"}}))
}
