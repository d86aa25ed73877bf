package datapathtest

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestNetNS: what runs inside sees the namespace and nothing else does; a thread
// that was inside never comes back; Close leaves nothing.
func TestNetNS(t *testing.T) {
	Leaks(t)
	const self = "/proc/thread-self/ns/net"
	outside, err := os.Readlink(self)
	require.NoError(t, err)
	n := NewNetNS(t)
	var inside string
	require.NoError(t, n.Do(func() (err error) {
		inside, err = os.Readlink(self)
		if err != nil {
			return err
		}
		ifs, err := net.Interfaces()
		if err != nil {
			return err
		}
		assert.Len(t, ifs, 1)
		assert.NotZero(t, ifs[0].Flags&net.FlagUp, "loopback is down")
		return nil
	}))
	assert.NotEqual(t, outside, inside)
	named, err := os.Readlink(n.Path())
	require.NoError(t, err)
	assert.Equal(t, inside, named)

	want := errors.New("the function's")
	for range 50 {
		assert.Equal(t, want, n.Do(func() error { return want }))
		done := make(chan string)
		go func() {
			ns, _ := os.Readlink(self)
			done <- ns
		}()
		require.Equal(t, outside, <-done)
	}
	n.Close()
	n.Close()
	_, err = os.Stat(n.Path())
	assert.ErrorIs(t, err, os.ErrNotExist)
}
