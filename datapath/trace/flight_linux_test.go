package trace

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMain plays the process that dies with frames in its flight recorder.
func TestMain(m *testing.M) {
	if path := os.Getenv("CULVERT_TEST_FLIGHT"); path != "" {
		dieInFlight(path)
	}
	os.Exit(m.Run())
}

func dieInFlight(path string) {
	f, err := NewRecorder(path, "vm1", 64)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for i := range 100 {
		frame, _ := frame4(protoTCP, guestAddr, hostAddr, i, false)
		f.record(int64(i), 0, Inbound, &datapath.Frame{Segs: [][]byte{frame}, N: len(frame)}, 0)
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

// TestFlightKilled: the last frames are there after SIGKILL (FB-149).
func TestFlightKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vm1.flight")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "CULVERT_TEST_FLIGHT="+path)
	out, err := cmd.CombinedOutput()
	require.ErrorContains(t, err, "killed", "%s", out)

	var stream bytes.Buffer
	n, err := WriteFlight(&stream, path)
	require.NoError(t, err)
	require.Equal(t, 64, n)
	p := mustParse(t, stream.Bytes())
	assert.Equal(t, []Interface{{Name: "vm1/q0"}}, p.interfaces)
	for i, pkt := range p.packets {
		frame, _ := frame4(protoTCP, guestAddr, hostAddr, 36+i, false)
		assert.Equal(t, frame[:min(len(frame), flightSnap)], pkt.Data)
		assert.Equal(t, len(frame), pkt.Length)
		assert.EqualValues(t, 36+i, pkt.At)
	}
	assert.Len(t, tshark(t, mustWrite(t, stream.Bytes()), "frame.number"), 64)

	// The next one keeps it, but not one that saw nothing.
	for range 3 {
		next, err := NewRecorder(path, "vm1", 10)
		require.NoError(t, err)
		require.NoError(t, next.Close())
		require.NoError(t, next.Close())
	}
	n, err = WriteFlight(io.Discard, path+".old", path)
	require.NoError(t, err)
	assert.Equal(t, 64, n)
}

func mustWrite(t *testing.T, b []byte) string {
	path := filepath.Join(t.TempDir(), strconv.Itoa(len(b))+".pcapng")
	require.NoError(t, os.WriteFile(path, b, 0o600))
	return path
}

// TestFlight: both ways are recorded as they pass, over lives of the VM, with the
// reasons of drops.
func TestFlight(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vm1.flight")
	o := Options{FlightPath: func(string) string { return path }, FlightFrames: 10}
	b := newBed(t, o, ReaderOptions{})
	out, hdr := frame4(protoTCP, hostAddr, guestAddr, 500, true)
	in, _ := frame4(protoUDP, guestAddr, hostAddr, 5, false)
	for range 5 {
		b.send(t, 0, hdr, out)
		b.receive(t, 1, virtio.NetHdr{}, in)
	}
	f := b.receive(t, 1, virtio.NetHdr{}, in)
	b.att.QueuePairs()[1].(datapath.DropObserver).DroppedFromGuest(f, datapath.DropSpoofed)
	b.att.QueuePairs()[0].(datapath.DropObserver).DroppedToGuest(&datapath.Frame{Segs: [][]byte{in}, N: len(in)}, datapath.DropQueueFull)
	b.end(t)
	assert.Equal(t, map[string]uint64{"vm1": 12}, b.tracer.Stats().Flown, "two are overwritten")
	require.NoError(t, b.tracer.Close())
	b.att.QueuePairs()[1].(datapath.DropObserver).DroppedFromGuest(f, datapath.DropSpoofed) // closed

	var stream bytes.Buffer
	n, err := WriteFlight(&stream, path)
	require.NoError(t, err)
	require.Equal(t, 10, n)
	p := mustParse(t, stream.Bytes())
	lines := p.lines()
	assert.Equal(t, "vm1/q0 Out IP 10.0.2.1.40000 > 10.0.2.2.80: Flags [P.], seq 1000:1500, ack 2000, win 64240, length 500, checksum partial", lines[0])
	assert.Equal(t, "vm1/q1 In  IP 10.0.2.2.80 > 10.0.2.1.40000: UDP, length 5, drop spoofed-source", lines[8])
	assert.Equal(t, "vm1/q0 Out IP 10.0.2.2.80 > 10.0.2.1.40000: UDP, length 5, drop queue-full", lines[9])
}

// TestFlightTorn: a slot that was being written is skipped, the rest is read.
func TestFlightTorn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vm1.flight")
	r, err := NewRecorder(path, "vm1", 8)
	require.NoError(t, err)
	frame, _ := frame4(protoTCP, guestAddr, hostAddr, 5, false)
	for range 8 {
		r.record(1, 0, Inbound, &datapath.Frame{Segs: [][]byte{frame}, N: len(frame)}, 0)
	}
	r.slot(3)[50] ^= 1
	require.NoError(t, r.Close())
	n, err := WriteFlight(io.Discard, path)
	require.NoError(t, err)
	assert.Equal(t, 7, n)

	require.NoError(t, os.WriteFile(path, []byte("something else"), 0o600))
	_, err = WriteFlight(io.Discard, path)
	assert.ErrorContains(t, err, "it is no flight recorder of culvert's")
	_, err = WriteFlight(io.Discard, path+".none")
	assert.ErrorIs(t, err, os.ErrNotExist)
	for _, frames := range []int{-1, 0, MaxFlightFrames + 1} {
		_, err = NewRecorder(path, "vm1", frames)
		assert.Error(t, err)
	}
}

func FuzzFlight(f *testing.F) {
	path := filepath.Join(f.TempDir(), "vm1.flight")
	r, err := NewRecorder(path, "vm1", 3)
	require.NoError(f, err)
	frame, hdr := frame4(protoTCP, guestAddr, hostAddr, 5, true)
	for range 2 {
		r.record(1, 0, Inbound, &datapath.Frame{Hdr: hdr, Segs: [][]byte{frame}, N: len(frame)}, 0)
	}
	require.NoError(f, r.Close())
	file, err := os.ReadFile(path)
	require.NoError(f, err)
	f.Add(file[flightPage:], "vm1")
	f.Add([]byte{}, "\xff\n")
	f.Fuzz(func(t *testing.T, slots []byte, vm string) {
		file := make([]byte, flightPage)
		copy(file, flightMagic)
		copy(file[20:84], vm)
		for b := slots; len(b) >= flightSlot; b = b[flightSlot:] { // whoever made it can compute a checksum
			le.PutUint32(b, checksumOf(b[:flightSlot]))
		}
		name, flown, err := readFlight(append(file, slots...))
		require.NoError(t, err)
		out := appendInterface(appendSection(nil), name, linkEthernet, flightSnap)
		for i := range flown {
			out = flown[i].append(out, 0)
		}
		p := mustParse(t, out)
		require.Len(t, p.packets, len(flown))
		for _, pkt := range p.packets {
			_ = pkt.Line(p.interfaces[pkt.Interface])
		}
	})
}
