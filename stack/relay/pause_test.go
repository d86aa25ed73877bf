package relay

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A half-closed flow outlives a pause of its guest however long, and after it
// has all of its bound again (C-28).
func TestC28HalfClosedOverAPause(t *testing.T) {
	const bound = time.Hour
	synctest.Test(t, func(t *testing.T) {
		b := start(t, roomy, Options{HalfClose: bound})
		_ = b.client.CloseWrite()
		time.Sleep(bound - time.Minute)
		b.ourG.pause.set(true)
		time.Sleep(10*bound + time.Minute)
		require.True(t, b.running(), "paused")
		b.ourG.pause.set(false)
		began := time.Now()
		time.Sleep(bound - time.Second)
		synctest.Wait()
		require.True(t, b.running(), "resumed")
		assert.Equal(t, EndIdle, <-b.ended)
		assert.Equal(t, bound, time.Since(began))
	})
}

// A client keeps its UDP flow, and so its port (C-20), over a pause; the flow
// ends after it like any other (C-22).
func TestC28UDPOverAPause(t *testing.T) {
	const idle = 80 * time.Second
	bubble(t, idle, 10, func(t *testing.T, h *datagramTable) {
		mustDeliver(t, h, key(1), "before")
		time.Sleep(idle - time.Second)
		h.pause.set(true)
		time.Sleep(time.Hour)
		h.pause.set(false)
		time.Sleep(idle - time.Second)
		synctest.Wait()
		require.Equal(t, 1, h.Len(), "the guest had no time to answer in")
		mustDeliver(t, h, key(1), "after")
		require.Len(t, h.opened, 1)
		time.Sleep(idle * 9 / 8)
		synctest.Wait()
		assert.Zero(t, h.Len())

		// A pause between two looks counts as well.
		mustDeliver(t, h, key(2), "before")
		time.Sleep(idle - 2*time.Second)
		h.pause.set(true)
		time.Sleep(time.Second)
		h.pause.set(false)
		time.Sleep(idle - time.Second)
		synctest.Wait()
		assert.Equal(t, 1, h.Len())
		time.Sleep(idle * 9 / 8)
		synctest.Wait()
		assert.Zero(t, h.Len(), "a pause that is over for long counts no more")
	})
}
