package trace

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtio"
	"github.com/gopacket/gopacket/pcapgo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files anew")

// tshark reads a file with every checksum verified and prints the fields asked
// for, a line a packet.
func tshark(t *testing.T, file string, fields ...string) []string {
	t.Helper()
	path, err := exec.LookPath("tshark")
	datapathtest.Require(t, "tshark", err == nil, "apt-get install tshark")
	args := []string{
		"-n", "-r", file, "-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE", "-T", "fields", "-E", "separator=|",
	}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	cmd := exec.Command(path, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run(), errs.String())
	for line := range strings.Lines(errs.String()) {
		assert.Contains(t, line, "Running as user", "tshark complains")
	}
	return strings.Split(strings.TrimRight(out.String(), "\n"), "\n")
}

// TestTshark: what is written is opened without complaint, with its directions,
// comments and interfaces, and no checksum is wrong in it: of TCP and UDP, whole
// and partial, of super-frames, cut short or not (C-50).
func TestTshark(t *testing.T) {
	b := newBed(t, Options{Flow: func(FlowKey) (Flow, bool) { return Flow{Owner: "docker web", ID: 7}, true }}, ReaderOptions{Snap: 40000})
	sizes := []int{0, 1, 2, 3, 1447, 1448, 20000, 39000, 39001, 65495}
	sent := 0
	for i, n := range sizes {
		for _, proto := range []uint8{protoTCP, protoUDP} {
			if proto == protoUDP && n == 65495 {
				continue // with a header of its own: IPv4 holds it, but say so elsewhere
			}
			for _, partial := range []bool{false, true} {
				frame, hdr := frame4(proto, hostAddr, guestAddr, n, partial)
				if n > 1448 && partial {
					hdr.GSOType, hdr.GSOSize, hdr.HdrLen = virtio.GSOTCPv4, 1448, 54
					if proto == protoUDP {
						hdr.GSOType, hdr.HdrLen = virtio.GSOUDPL4, 42
					}
				}
				if i%2 == 0 {
					b.send(t, 0, hdr, frame)
				} else {
					b.receive(t, 0, hdr, frame)
				}
				sent++
			}
		}
	}
	frame, hdr := frame4(protoTCP, guestAddr, hostAddr, 9, true)
	f := b.receive(t, 1, hdr, frame)
	b.att.QueuePairs()[1].(datapath.DropObserver).DroppedFromGuest(f, datapath.DropForeign)
	b.att.Stats().Drop(datapath.DropTooLong)
	file := filepath.Join(t.TempDir(), "trace.pcapng")
	require.NoError(t, os.WriteFile(file, b.end(t), 0o600))

	got := tshark(t, file, "frame.interface_name", "frame.packet_flags_direction", "frame.len", "tcp.checksum.status", "udp.checksum.status",
		"ip.checksum.status", "_ws.malformed", "frame.comment")
	require.Len(t, got, sent+2)
	for _, line := range got[:sent] {
		f := strings.Split(line, "|")
		assert.Equal(t, "vm1/q0", f[0])
		assert.Contains(t, []string{"0x00000001", "0x00000002", "1", "2"}, f[1])
		good := f[3] + f[4] // 1 good, 2 unverified: the frame is cut short
		if len(f[2]) == 5 && f[2] > "40000" {
			assert.Equal(t, "2", good, line)
		} else {
			assert.Equal(t, "1", good, line)
		}
		assert.Equal(t, "1", f[5], line)
		assert.Empty(t, f[6], line)
		assert.Contains(t, f[7], "owner docker web")
		assert.Contains(t, f[7], "flow 7")
	}
	assert.Contains(t, got[sent], "drop foreign-source")
	assert.Contains(t, got[sent+1], "vm1/drops")
	assert.Contains(t, got[sent+1], "drop too-long")
}

// TestOddFrames: no frame ends the trace or hides another (FB-167), and each is
// one line.
func TestOddFrames(t *testing.T) {
	b := newBed(t, Options{}, ReaderOptions{})
	good, _ := frame4(protoUDP, guestAddr, hostAddr, 4, false)
	tagged := append(append(bytes.Clone(good[:12]), 0x81, 0, 0, 5), good[12:]...)
	odd := map[string][]byte{
		"runt": good[:20], "jumbo": append(bytes.Clone(good), make([]byte, 9000)...), "vlan": tagged, "qinq": append(append(bytes.Clone(good[:12]), 0x88, 0xa8, 0, 6), tagged[12:]...),
		"unknown": append(bytes.Clone(good[:12]), 0x88, 0xb5, 1, 2, 3), "longest": make([]byte, datapath.MaxFrame), "zero": make([]byte, 60),
		"options": append(append(bytes.Clone(good[:14]), 0x4f), good[15:]...), "version": append(append(bytes.Clone(good[:14]), 0x65), good[15:]...),
	}
	names := []string{"runt", "jumbo", "vlan", "qinq", "unknown", "longest", "zero", "options", "version"}
	require.Len(t, names, len(odd))
	for i, name := range names {
		binary.BigEndian.PutUint32(good[42:], uint32(i))
		b.receive(t, 0, virtio.NetHdr{}, good)
		b.receive(t, 0, virtio.NetHdr{}, odd[name])
	}
	stream := b.end(t)
	p := mustParse(t, stream)
	require.Len(t, p.packets, 2*len(names))
	for i, name := range names {
		assert.EqualValues(t, i, binary.BigEndian.Uint32(p.packets[2*i].Data[42:]))
		assert.True(t, bytes.Equal(odd[name], p.packets[2*i+1].Data), name)
	}
	lines := p.lines()
	assert.Contains(t, lines[9], "unknown (0x88b5), length 3")
	assert.Contains(t, lines[5], "vlan 5, IP 10.0.2.2.80 > 10.0.2.1.40000: UDP, length 4")
	file := filepath.Join(t.TempDir(), "trace.pcapng")
	require.NoError(t, os.WriteFile(file, stream, 0o600))
	assert.Len(t, tshark(t, file, "frame.number"), 2*len(names))
}

// TestEveryLength: frames of a thousand lengths arrive byte for byte, each once
// (FB-166).
func TestEveryLength(t *testing.T) {
	b := newBed(t, Options{}, ReaderOptions{})
	var frames [][]byte
	for i := range 1000 {
		frame := make([]byte, 60+i*(65549-60)/999)
		for j := range frame {
			frame[j] = byte(i + j)
		}
		binary.BigEndian.PutUint32(frame[14:], uint32(i))
		frames = append(frames, frame)
		b.receive(t, i%2, virtio.NetHdr{}, frame)
		b.att.QueuePairs()[i%2].(*queuePair).settle()
		require.Eventually(t, func() bool { // it reads as fast as it can
			return i-int(b.reader.ring.head.Load()) < 100
		}, time.Minute, time.Millisecond)
	}
	p := mustParse(t, b.end(t))
	require.Zero(t, b.reader.Lost())
	require.Len(t, p.packets, 1000)
	for i, pkt := range p.packets {
		require.True(t, bytes.Equal(frames[i], pkt.Data), "frame %d", i)
	}
}

// TestGolden: the bytes of a small trace.
func TestGolden(t *testing.T) {
	out := appendSection(nil)
	out = appendInterface(out, "vm1/q0", linkEthernet, DefaultSnap)
	frame, _ := frame4(protoUDP, hostAddr, guestAddr, 5, false)
	for i := range int64(2) {
		p := Packet{At: 1767366245_000000001 + i, Dir: Direction(1 + i), Lost: uint64(i), Length: len(frame), Data: frame}
		start := len(out)
		out = p.data(p.head(beginBlock(out, BlockPacket)))
		out = endBlock(appendCount(appendComment(out, "owner ", "cli 8080:80/tcp"), "flow ", 3, ""), start)
	}
	out = AppendStatistics(out, 0, 1767366245_000000003, 2, 1)
	golden := filepath.Join("testdata", "small.pcapng")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(golden, out, 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	assert.Equal(t, want, out)
	got := tshark(t, golden, "frame.time_epoch", "udp.length", "frame.comment")
	assert.Equal(t, []string{
		"1767366245.000000001|13|owner cli 8080:80/tcp,flow 3", "1767366245.000000002|13|owner cli 8080:80/tcp,flow 3",
	}, got)
}

// FuzzPcapng: another reader finds in what is written what was to be written.
func FuzzPcapng(f *testing.F) {
	f.Add([]byte("frame"), int64(1), uint8(1), uint64(0), "owner", "vm1", uint16(3))
	f.Add([]byte{}, int64(1<<62), uint8(2), uint64(1<<63), "", "", uint16(0))
	f.Fuzz(func(t *testing.T, data []byte, at int64, dir uint8, lost uint64, comment, name string, more uint16) {
		if at < 0 || len(name) > 1000 || len(data) > 1<<16 {
			return
		}
		p := Packet{At: at, Dir: Direction(dir & 3), Lost: lost, Length: len(data) + int(more), Data: data}
		out := appendInterface(appendSection(nil), name, linkEthernet, 0)
		start := len(out)
		out = p.data(p.head(beginBlock(out, BlockPacket)))
		out = endBlock(appendComment(out, comment, comment), start)
		out = AppendStatistics(out, 0, at, 1, lost)

		r, err := pcapgo.NewNgReader(bytes.NewReader(out), pcapgo.DefaultNgReaderOptions)
		require.NoError(t, err)
		got, ci, opts, err := r.ReadPacketDataWithOptions()
		require.NoError(t, err)
		require.Equal(t, data, append([]byte{}, got...))
		require.Equal(t, p.Length, ci.Length)
		require.Equal(t, at, ci.Timestamp.UnixNano())
		require.Equal(t, []string{comment + comment[:min(len(comment), maxComment)]}, opts.Comments)
		require.Equal(t, lost > 0, opts.DropCount != nil)
		i, err := r.Interface(0)
		require.NoError(t, err)
		require.Equal(t, name, i.Name)
		_, _, err = r.ReadPacketData()
		require.ErrorIs(t, err, io.EOF)

		mine := mustParse(t, out).packets
		require.Len(t, mine, 1)
		require.Equal(t, p.Dir, mine[0].Dir)
		require.Equal(t, lost, mine[0].Lost)
		require.True(t, bytes.Equal(data, mine[0].Data))
	})
}

// FuzzBlockReader: whatever comes is read or refused.
func FuzzBlockReader(f *testing.F) {
	small, err := os.ReadFile(filepath.Join("testdata", "small.pcapng"))
	require.NoError(f, err)
	f.Add(small)
	f.Add(small[:50])
	f.Fuzz(func(t *testing.T, stream []byte) {
		r := NewBlockReader(bytes.NewReader(stream))
		for {
			b, err := r.Next()
			if err != nil {
				return
			}
			require.NotEmpty(t, b.Raw)
			_, _ = b.Interface()
			_, _, _, _ = b.Statistics()
			if p, err := b.Packet(); err == nil {
				_ = fmt.Sprint(p.Line(Interface{}), p.Line(Interface{Text: true}))
			}
		}
	})
}
