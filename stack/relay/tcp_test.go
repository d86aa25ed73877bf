package relay

import (
	"bytes"
	"io"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// roomy is more than any test sends.
const roomy = 1 << 24

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7 / 3)
	}
	return b
}

func TestTCPBothWays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, 4096, Options{})
		sent := pattern(1 << 20)
		go func() {
			_, _ = b.client.Write(sent)
			_ = b.client.CloseWrite()
		}()
		go func() {
			_, _ = io.Copy(writerOnly{b.server}, readerOnly{b.server}) // echoes
			_ = b.server.CloseWrite()
		}()
		got, err := io.ReadAll(b.client)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(sent, got))
		assert.Equal(t, EndClosed, <-b.ended)
		assert.EqualValues(t, len(sent), b.toGuest.Bytes())
		assert.EqualValues(t, len(sent), b.toHost.Bytes())
		assert.False(t, b.ourC.aborted || b.ourG.aborted, "no reset")
		assert.True(t, b.ourC.closed && b.ourG.closed)
	})
}

// The guest's end reaches a client that keeps its own stream open, and that may
// go on to send.
func TestFB001FB007FB005GuestEndsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, roomy, Options{HalfClose: time.Hour})
		_, _ = b.server.Write([]byte("banner"))
		_ = b.server.CloseWrite()
		got, err := io.ReadAll(b.client)
		require.NoError(t, err)
		assert.Equal(t, "banner", string(got))
		require.True(t, b.running(), "the client's stream is open")
		assert.Equal(t, []Half{HalfGuest}, b.halves)

		upload := pattern(8 << 20)
		for at := 0; at < len(upload); at += 2 << 20 {
			_, err := b.client.Write(upload[at : at+2<<20])
			require.NoError(t, err)
			time.Sleep(30 * time.Minute)
		}
		_ = b.client.CloseWrite()
		got, err = io.ReadAll(b.server)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(upload, got))
		assert.Equal(t, EndClosed, <-b.ended)
	})
}

// The client's end is passed on as an end, and the answer comes back however
// long it takes.
func TestFB002FB003ClientEndsFirst(t *testing.T) {
	for _, sent := range []string{"", "hello"} {
		for _, delay := range []time.Duration{0, 50 * time.Millisecond, 5 * time.Second, 90 * time.Second, 59 * time.Minute} {
			synctest.Test(t, func(t *testing.T) {
				b := start(t, roomy, Options{HalfClose: time.Hour})
				_, _ = b.client.Write([]byte(sent))
				_ = b.client.CloseWrite()
				got, err := io.ReadAll(b.server)
				require.NoError(t, err)
				assert.Equal(t, sent, string(got))
				time.Sleep(delay)
				_, err = b.server.Write([]byte("OK"))
				require.NoError(t, err)
				_ = b.server.CloseWrite()
				got, err = io.ReadAll(b.client)
				require.NoError(t, err, delay)
				assert.Equal(t, "OK", string(got))
				assert.Equal(t, EndClosed, <-b.ended)
				assert.Equal(t, []Half{HalfClient}, b.halves)
			})
		}
	}
}

// What is on its way in one direction when the other ends arrives.
func TestFB011PendingBytesArrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, 64<<10, Options{HalfClose: time.Hour})
		_ = b.client.CloseWrite()
		sent := pattern(4 << 20)
		go func() {
			_, _ = b.server.Write(sent)
			_ = b.server.Close()
		}()
		var got bytes.Buffer
		for {
			time.Sleep(50 * time.Millisecond)
			n, err := io.CopyN(&got, readerOnly{b.client}, 64<<10)
			if n == 0 {
				require.ErrorIs(t, err, io.EOF)
				break
			}
		}
		assert.True(t, bytes.Equal(sent, got.Bytes()))
		assert.Equal(t, EndClosed, <-b.ended)
	})
}

// A stopped reader stops the writer: what is in between is bounded (C-17).
func TestC17BackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 4096
		b := start(t, limit, Options{})
		wrote := Meter{}
		b.client.SetMeters(nil, &wrote)
		go func() { _, _ = b.client.Write(pattern(1 << 20)) }()
		synctest.Wait()
		// Both wires, and one buffer of the copy.
		assert.LessOrEqual(t, wrote.Bytes(), uint64(2*limit+32<<10))
		b.server.Abort()
		assert.Equal(t, EndGuestReset, <-b.ended)
	})
}

// A reset is passed on as a reset, never as an end, whatever the copies were
// doing.
func TestFB013Reset(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(b *bed) (peer *end) // returns whom it must reach
		end  End
	}{
		{"client resets", func(b *bed) *end { b.client.Abort(); return b.server }, EndClientReset},
		{"guest resets", func(b *bed) *end { b.server.Abort(); return b.client }, EndGuestReset},
		{"guest closes without reading", func(b *bed) *end {
			_, _ = b.client.Write(pattern(100_000))
			_, _ = io.ReadFull(b.server, make([]byte, 1))
			_ = b.server.Close()
			return b.client
		}, EndGuestReset},
		{"client resets after its end", func(b *bed) *end {
			_ = b.client.CloseWrite()
			_, _ = io.ReadAll(b.server)
			b.client.Abort()
			return b.server
		}, EndClientReset},
		{"guest resets after its end", func(b *bed) *end {
			_ = b.server.CloseWrite()
			_, _ = io.ReadAll(b.client)
			b.server.Abort()
			return b.client
		}, EndGuestReset},
		{"client vanishes after its end (C-14)", func(b *bed) *end {
			_ = b.client.CloseWrite()
			_, _ = io.ReadAll(b.server)
			b.ourC.vanish()
			return b.server
		}, EndClientReset},
		{"guest vanishes after its end (C-14)", func(b *bed) *end {
			_ = b.server.CloseWrite()
			_, _ = io.ReadAll(b.client)
			b.ourG.vanish()
			return b.client
		}, EndGuestReset},
		{"guest resets while written to", func(b *bed) *end {
			go func() { _, _ = b.client.Write(pattern(roomy)) }()
			time.Sleep(time.Second)
			b.server.Abort()
			return b.client
		}, EndGuestReset},
		{"client resets while written to", func(b *bed) *end {
			go func() { _, _ = b.server.Write(pattern(roomy)) }()
			time.Sleep(time.Second)
			b.client.Abort()
			return b.server
		}, EndClientReset},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := start(t, 64<<10, Options{HalfClose: time.Hour})
				peer := c.do(b)
				began := time.Now()
				assert.Equal(t, c.end, <-b.ended)
				assert.LessOrEqual(t, time.Since(began), drainAfterReset)
				peer.wire.mu.Lock()
				defer peer.wire.mu.Unlock()
				assert.True(t, peer.dead, "reset")
				assert.True(t, b.ourC.closed && b.ourG.closed)
			})
		})
	}
}

// A side tells of its reset once. If it is the writing copy that hears of it,
// the reading one finds an end, which must not be passed on.
func TestFB013ResetToldToTheOtherCopy(t *testing.T) {
	for _, side := range []Half{HalfClient, HalfGuest} {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, 16, Options{})
			ours, peer := b.ourC, b.server
			if side == HalfGuest {
				ours, peer = b.ourG, b.client
			}
			synctest.Wait()
			// A write that is told, and gets no further than that.
			ours.wire.mu.Lock()
			ours.lose(syscall.ECONNRESET)
			_ = ours.state()
			ours.wire.change.Broadcast()
			ours.wire.mu.Unlock()

			assert.Equal(t, resetBy(side), <-b.ended)
			_, err := peer.Read(make([]byte, 1))
			assert.True(t, isReset(err), "%v", err)
			assert.Zero(t, b.ourC.closeWr+b.ourG.closeWr, "no end was passed on")
		})
	}
}

// A server that answers and closes without having read all of the request
// resets; the client still gets the answer.
func TestAnswerBeforeReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, 8<<10, Options{})
		answer := pattern(100)
		go func() { _, _ = b.client.Write(pattern(1 << 20)) }()
		synctest.Wait() // the copy to the guest waits for room
		b.server.wire.mu.Lock()
		b.ourG.wire.to[0].data = append(b.ourG.wire.to[0].data, answer...)
		b.ourG.lose(syscall.ECONNRESET)
		b.server.wire.change.Broadcast()
		b.server.wire.mu.Unlock()
		got := make([]byte, len(answer))
		_, err := io.ReadFull(b.client, got)
		require.NoError(t, err)
		assert.Equal(t, answer, got)
		assert.Equal(t, EndGuestReset, <-b.ended)
		assert.True(t, b.client.dead, "reset after that")
	})
}

// The same with a client that does not read: the reset does not wait for it.
func TestDrainAfterResetIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, 1024, Options{})
		go func() { _, _ = b.client.Write(pattern(1 << 20)) }()
		go func() { _, _ = b.server.Write(pattern(1 << 20)) }()
		synctest.Wait() // both copies wait for room
		began := time.Now()
		b.server.Abort()
		assert.Equal(t, EndGuestReset, <-b.ended)
		assert.LessOrEqual(t, time.Since(began), drainAfterReset)
	})
}

// A half-closed flow that passes nothing ends at its bound; one that passes a
// byte now and then does not.
func TestFB010HalfCloseBound(t *testing.T) {
	const bound = time.Hour
	for _, side := range []Half{HalfClient, HalfGuest} {
		synctest.Test(t, func(t *testing.T) {
			b := start(t, roomy, Options{HalfClose: bound})
			quiet, other := b.client, b.server
			if side == HalfGuest {
				quiet, other = b.server, b.client
			}
			time.Sleep(10 * bound) // an open flow has none
			require.True(t, b.running())
			_ = quiet.CloseWrite()
			synctest.Wait()
			assert.Equal(t, 1, b.ourC.keepAlive)
			assert.Equal(t, 1, b.ourG.keepAlive)
			for range 9 {
				time.Sleep(bound / 3)
				_, err := other.Write([]byte{1})
				require.NoError(t, err)
			}
			synctest.Wait()
			require.True(t, b.running(), "refreshed by traffic")

			began := time.Now()
			assert.Equal(t, EndIdle, <-b.ended)
			assert.Equal(t, bound, time.Since(began))
			for _, peer := range []*end{b.client, b.server} {
				assert.True(t, peer.dead, "reset")
			}
		})
	}
}

// Sides that cannot be watched are found by the bound all the same.
func TestFB010BoundWithoutWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ourC, client := newWire(roomy)
		ourG, server := newWire(roomy)
		var toGuest, toHost Meter
		ended := make(chan End)
		go func() {
			ended <- TCP(ourC, blind{ourG}, Options{HalfClose: time.Minute, ToGuest: &toGuest, ToHost: &toHost})
		}()
		_ = server.CloseWrite()
		_, err := io.ReadAll(client)
		require.NoError(t, err)
		began := time.Now()
		assert.Equal(t, EndIdle, <-ended)
		assert.Equal(t, time.Minute, time.Since(began))
	})
}

// Whoever holds a flow ends it by aborting either side, in every state.
func TestAbortEnds(t *testing.T) {
	for _, state := range []string{"open", "half-closed by the client", "half-closed by the guest"} {
		for _, side := range []string{"client", "guest"} {
			t.Run(state+", abort of the "+side, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := start(t, roomy, Options{HalfClose: time.Hour})
					switch state {
					case "half-closed by the client":
						_ = b.client.CloseWrite()
					case "half-closed by the guest":
						_ = b.server.CloseWrite()
					}
					time.Sleep(time.Second)
					if side == "client" {
						b.ourC.Abort()
					} else {
						b.ourG.Abort()
					}
					assert.Equal(t, EndAborted, <-b.ended)
					assert.True(t, b.client.dead && b.server.dead, "both peers are reset")
				})
			})
		}
	}
}

// Half-close is passed on through the interface, whatever stands behind it.
func TestFB004CloseWriteOfEachSide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, roomy, Options{})
		_ = b.client.CloseWrite()
		synctest.Wait()
		assert.Equal(t, 1, b.ourG.closeWr)
		assert.Zero(t, b.ourC.closeWr)
		_ = b.server.CloseWrite()
		synctest.Wait()
		assert.Equal(t, 1, b.ourC.closeWr)
		assert.Equal(t, EndClosed, <-b.ended)
	})
}

func TestEndString(t *testing.T) {
	for e, want := range map[End]string{
		EndClosed: "closed", EndClientReset: "client-reset", EndGuestReset: "guest-reset", EndIdle: "idle", EndAborted: "aborted",
	} {
		assert.Equal(t, want, e.String())
	}
}
