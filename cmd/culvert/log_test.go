package main

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/culvertnet/culvert/cmd/internal/daemon"
)

// A guest that makes ports come and go without end does not fill the disk, nor
// does it keep another VM, or an error, from being heard of.
func TestC47LogOfOneVMIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := newLogger(&out, daemon.LogConfig{Level: "info", Format: "text"})
		lines := func() (n int) {
			n = bytes.Count(out.Bytes(), []byte("\n"))
			out.Reset()
			return n
		}
		noisy := log.With("vm", "noisy")
		for range logBurst {
			noisy.Info("withdrawn")
			log.Info("publish forwarded", "vm", "noisy")
			noisy.Debug("not of this level")
		}
		assert.Equal(t, logBurst, lines())
		log.Info("vm state", "vm", "quiet", "state", "ready")
		log.Info("ready")
		noisy.Error("this is serious")
		assert.Equal(t, 3, lines())

		// An hour of it is six times what it may have in ten minutes.
		for range 3600 {
			time.Sleep(time.Second)
			for range 20 {
				noisy.Info("withdrawn")
			}
		}
		hour := strings.Split(out.String(), "\n")
		told := 0
		for _, line := range hour {
			if strings.Contains(line, "log lines left out") {
				told++
				assert.Equal(t, 1, strings.Count(line, "vm=noisy"))
			}
		}
		assert.InDelta(t, 6*logBurst, len(hour)-told, 10)
		assert.Contains(t, hour[0], "lines=5000")
		out.Reset()

		time.Sleep(logRefill)
		for range logBurst {
			noisy.Info("withdrawn")
		}
		assert.Equal(t, logBurst+1, lines(), "a note of those that were left out last")
	})
}
