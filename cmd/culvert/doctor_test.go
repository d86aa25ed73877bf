package main

import (
	"encoding/json"
	"testing"

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

func TestBrokenStepsAreFew(t *testing.T) {
	steps := make([]api.Step, 100)
	for i := range steps {
		steps[i] = api.Step{Row: "a", Step: "guest port", State: "broken"}
	}
	assert.EqualError(t, brokenSteps(steps), "broken: a: guest port, a: guest port, a: guest port, 97 more")
	assert.NoError(t, brokenSteps([]api.Step{{State: "ok"}, {State: "skipped"}, {State: "unknown"}}))
}
