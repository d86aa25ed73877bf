package stack

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/culvertnet/culvert/stack/listener"
)

// A guest that publishes without end leaves descriptors to others: half of them
// to the first other guest, and what the host's user publishes is not asked.
func TestC29C53GuestsShareDescriptors(t *testing.T) {
	f, g := mustAttached(t, Options{Limits: Limits{Descriptors: 1 << 20}})
	f.share.most = 16 // of sockets, whatever numbers they get
	f.AttachVM("other", VM{Guest: g, Node: node})
	states := func(vm string, n int) (states []listener.State) {
		for i := range n {
			s := mustSpec(t, fmt.Sprintf("127.0.0.1:0:%d", 80+i))
			s.Target.VM = vm
			out := f.Publish(ctx, listener.Owner{Kind: listener.KindDocker, ID: fmt.Sprint(i), VM: vm}, []listener.Spec{s})
			require.Len(t, out, 1)
			if out[0].State == listener.Failed {
				assert.ErrorIs(t, out[0].Err, syscall.EMFILE)
				assert.Empty(t, out[0].Bound)
				assert.NotZero(t, out[0].RetryAt)
			}
			states = append(states, out[0].State)
		}
		return states
	}
	forwarded := func(states []listener.State) (n int) {
		for _, s := range states {
			if s == listener.Forwarded {
				n++
			}
		}
		return n
	}
	assert.Equal(t, 8, forwarded(states("default", 20)))
	assert.Equal(t, 4, forwarded(states("other", 20)))
	for i := range 5 { // the user's own
		mustPublish(t, f, fmt.Sprint("user", i), "0:80")
	}

	// What leaves makes room, and what stays is not asked again.
	f.DetachVM("default")
	f.mu.Lock()
	f.tryThese(slices.Collect(maps.Keys(f.failing)))
	f.mu.Unlock()
	assert.Equal(t, 8, f.share.all)
	assert.Equal(t, map[string]int{"other": 8}, f.share.guest)
	f.AttachVM("default", VM{Guest: g, Node: node})
	assert.Equal(t, map[string]int{"other": 8, "default": 4}, f.share.guest)
	for vm, n := range map[string]int{"other": 20, "default": 20} {
		for i := range n {
			f.Withdraw(ctx, listener.Owner{Kind: listener.KindDocker, ID: fmt.Sprint(i), VM: vm})
		}
	}
	assert.Zero(t, f.share.all)
	assert.Empty(t, f.share.guest)
}

// What a row that fails costs does not depend on how many fail: the timer of the
// first is that of all, and a row that leaves asks those alone that it may have
// blocked.
func TestFailingRowsAreNotGoneThrough(t *testing.T) {
	f, _ := mustAttached(t, Options{Limits: Limits{Descriptors: 1 << 20}})
	f.share.most = 1 // nothing of a guest's is opened
	state := func() (timer *time.Timer, failing, blocked int) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.retry, len(f.failing), len(f.blocked)
	}
	guest := func(i int, texts ...string) {
		var specs []listener.Spec
		for _, text := range texts {
			specs = append(specs, mustSpec(t, text))
		}
		f.Publish(ctx, listener.Owner{Kind: listener.KindDocker, ID: fmt.Sprint(i), VM: "default"}, specs)
	}
	guest(0, "0:80")
	first, failing, _ := state()
	assert.NotNil(t, first)
	assert.Equal(t, 1, failing)
	for i := range 100 {
		guest(1+i, "0:80")
	}
	last, failing, blocked := state()
	assert.Same(t, first, last)
	assert.Equal(t, 101, failing)
	assert.Zero(t, blocked)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	publish(t, f, "user", fmt.Sprintf("127.0.0.1:%d:80", l.Addr().(*net.TCPAddr).Port))
	_, failing, blocked = state()
	assert.Equal(t, 102, failing)
	assert.Equal(t, 1, blocked)

	publish(t, f, "user")
	for i := range 101 {
		guest(i)
	}
	_, failing, blocked = state()
	assert.Zero(t, failing)
	assert.Zero(t, blocked)
	f.retryDue() // the timer of those that have left
	last, _, _ = state()
	assert.Nil(t, last)
}
