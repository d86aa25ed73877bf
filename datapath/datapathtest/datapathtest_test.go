package datapathtest

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A recorder stands in for a test and notes what it was told.
type recorder struct {
	testing.TB
	skipped, failed bool
	cleanups        []func()
}

func (r *recorder) Helper()               {}
func (r *recorder) Skipf(string, ...any)  { r.skipped = true }
func (r *recorder) Fatalf(string, ...any) { r.failed = true }
func (r *recorder) Errorf(string, ...any) { r.failed = true }
func (r *recorder) Skipped() bool         { return r.skipped }
func (r *recorder) Failed() bool          { return r.failed }
func (r *recorder) Cleanup(f func())      { r.cleanups = append(r.cleanups, f) }
func (r *recorder) end() {
	for _, f := range r.cleanups {
		f()
	}
}

// TestRequire: what is missing is a skip, and a failure where it is named.
func TestRequire(t *testing.T) {
	for _, test := range []struct {
		env             string
		ok              bool
		skipped, failed bool
	}{
		{"", true, false, false},
		{"tun", true, false, false},
		{"", false, true, false},
		{"netns,qemu", false, true, false},
		{"tunnel", false, true, false},
		{"tun", false, false, true},
		{"netns,tun,qemu", false, false, true},
	} {
		t.Setenv("CULVERT_TEST_REQUIRE", test.env)
		r := new(recorder)
		Require(r, "tun", test.ok, "modprobe tun")
		assert.Equal(t, test.failed, r.failed, "%+v", test)
		// A recorder's Fatalf does not stop Require, so Skipf follows it.
		assert.Equal(t, test.skipped, r.skipped && !r.failed, "%+v", test)
	}
}

// TestLeaks: a descriptor or a goroutine too many is an error; one that goes
// late, or was there before, is none.
func TestLeaks(t *testing.T) {
	const short, long = 50 * time.Millisecond, time.Minute
	stop := make(chan struct{})
	var left *os.File
	for _, test := range []struct {
		name   string
		settle time.Duration
		leave  func()
		undo   func()
		leaks  bool
	}{
		{"nothing", short, func() {}, func() {}, false},
		{"descriptor", short, func() { left, _ = os.Open(os.DevNull) }, func() { _ = left.Close() }, true},
		{"goroutine", short, func() { go func() { <-stop }() }, func() { stop <- struct{}{} }, true},
		{"late goroutine", long, func() { go time.Sleep(20 * time.Millisecond) }, func() {}, false},
	} {
		r := new(recorder)
		leaks(r, test.settle)
		test.leave()
		r.end()
		test.undo()
		assert.Equal(t, test.leaks, r.failed, test.name)
	}
	require.NotNil(t, left)
}
