package trace

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/virtio"
)

// # Theory of operation
//
// The flight recorder of a VM is a file mapped into memory: a page that says what
// it is, and a ring of slots, each the headers of one frame. What was stored is
// in the kernel's hands at once, so it is there after a crash or SIGKILL; nothing
// is ever written out for it. A slot carries a checksum over itself: one that was
// being written when the process died, or that is no slot at all, is skipped.
// The daemon before this one is remembered too, in a file beside it ("….old"),
// unless it has seen nothing: one that fails to start, again and again, must not
// push out what came before.

const (
	flightMagic = "culvert flight 1"
	flightPage  = 4096 // magic 16, slots 4, VM's name 64; the rest is zero

	// A slot, in little-endian order: checksum of the rest 4, length 4, number 8,
	// time 8, queue 2, kept 2, direction 1, drop 1, virtio-net header 10, then data.
	flightHead = 40
	flightSnap = 128
	flightSlot = flightHead + flightSnap

	// MaxFlightFrames bounds a recorder: 168 MB of file.
	MaxFlightFrames = 1_000_000
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// checksumOf returns the checksum that a slot should have.
func checksumOf(slot []byte) uint32 { return crc32.Checksum(slot[4:], crcTable) }

// A Recorder is the flight recorder of one VM. It is safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex
	mem   []byte // nil once closed
	slots uint64
	next  uint64 // number of the next frame, from 1
}

// NewRecorder makes the file at path, for frames of vm, and keeps what a daemon
// before left there as path with ".old" behind it.
func NewRecorder(path, vm string, frames int) (*Recorder, error) {
	if frames < 1 || frames > MaxFlightFrames {
		return nil, fmt.Errorf("flight recorder of %d frames: there can be 1 to %d", frames, MaxFlightFrames)
	}
	if err := keepOld(path); err != nil {
		return nil, fmt.Errorf("keep flight recorder: %w", err)
	}
	mem, err := mapFile(path, flightPage+frames*flightSlot)
	if err != nil {
		return nil, fmt.Errorf("make flight recorder %s: %w", path, err)
	}
	copy(mem, flightMagic)
	le.PutUint32(mem[16:], uint32(frames))
	copy(mem[20:84], vm)
	return &Recorder{mem: mem, slots: uint64(frames), next: 1}, nil
}

// keepOld moves a file that has any frames out of the way, and removes any other.
func keepOld(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var first [8]byte // the number in the first slot
	if _, err := f.ReadAt(first[:], flightPage+8); err == nil && first != [8]byte{} {
		return os.Rename(path, path+".old")
	}
	return os.Remove(path)
}

// record keeps a frame's headers and returns its number, 0 when closed.
func (f *Recorder) record(at int64, queue int, dir Direction, fr *datapath.Frame, why drop) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mem == nil {
		return 0
	}
	number := f.next
	f.next++
	s := f.slot(number)
	n := gather(s[flightHead:flightHead+min(fr.N, flightSnap)], fr.Segs)
	le.PutUint32(s[4:], uint32(fr.N))
	le.PutUint64(s[8:], number)
	le.PutUint64(s[16:], uint64(at))
	le.PutUint16(s[24:], uint16(queue))
	le.PutUint16(s[26:], uint16(n))
	s[28], s[29] = byte(dir), byte(why)
	fr.Hdr.Put(s[30:flightHead])
	le.PutUint32(s, checksumOf(s))
	return number
}

// recorded returns how many frames have been recorded.
func (f *Recorder) recorded() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.next - 1
}

// mark says why a frame was dropped, if it is still there.
func (f *Recorder) mark(number uint64, why datapath.DropReason) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mem == nil || number == 0 || number+f.slots < f.next {
		return
	}
	s := f.slot(number)
	s[29] = byte(dropOf(why))
	le.PutUint32(s, checksumOf(s))
}

func (f *Recorder) slot(number uint64) []byte {
	at := flightPage + int((number-1)%f.slots)*flightSlot
	return f.mem[at : at+flightSlot]
}

// Close unmaps the file, which stays.
func (f *Recorder) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	mem := f.mem
	if f.mem = nil; mem == nil {
		return nil
	}
	return unmap(mem)
}

// A flownFrame is a slot, read back.
type flownFrame struct {
	number uint64
	rec    record
	data   []byte
}

// WriteFlight writes what the flight recorders' files hold as one pcapng stream
// and returns how many frames that were. Files are read as far as they make
// sense; one that is no flight recorder is an error.
func WriteFlight(w io.Writer, paths ...string) (frames int, err error) {
	out := appendSection(nil)
	interfaces := uint32(0)
	for _, path := range paths {
		file, err := os.ReadFile(path)
		if err != nil {
			return frames, fmt.Errorf("read flight recorder: %w", err)
		}
		vm, flown, err := readFlight(file)
		if err != nil {
			return frames, fmt.Errorf("read flight recorder %s: %w", path, err)
		}
		ids := make(map[int]uint32) // by queue
		for i := range flown {
			f := &flown[i]
			if _, ok := ids[f.rec.queue]; !ok {
				ids[f.rec.queue] = interfaces
				interfaces++
				out = appendInterface(out, fmt.Sprintf("%s/q%d", vm, f.rec.queue), linkEthernet, flightSnap)
			}
			out = f.append(out, ids[f.rec.queue])
			if len(out) > 1<<20 {
				if _, err := w.Write(out); err != nil {
					return frames, err
				}
				out = out[:0]
			}
			frames++
		}
		if len(flown) == 0 {
			interfaces++
			out = appendInterface(out, vm+"/q0", linkEthernet, flightSnap)
		}
	}
	_, err = w.Write(out)
	return frames, err
}

func (f *flownFrame) append(out []byte, id uint32) []byte {
	p := Packet{Interface: id, At: f.rec.at, Dir: f.rec.dir, Length: f.rec.length, Data: f.data}
	start := len(out)
	out = p.data(p.head(beginBlock(out, BlockPacket)))
	h := parseHeaders(f.data)
	if f.rec.hdr.Flags&flagNeedsCSum != 0 && !(f.rec.drop == 0 && f.rec.length == len(f.data) && complete(f.data, &f.rec.hdr, &h)) {
		out = appendComment(out, "checksum partial", "")
	}
	if f.rec.drop != 0 {
		out = appendComment(out, "drop ", datapath.DropReason(f.rec.drop-1).String())
	}
	return endBlock(out, start)
}

// readFlight returns the frames of a flight recorder's file, oldest first.
func readFlight(file []byte) (vm string, flown []flownFrame, err error) {
	if len(file) < flightPage || string(file[:len(flightMagic)]) != flightMagic {
		return "", nil, errors.New("it is no flight recorder of culvert's")
	}
	name, _, _ := bytes.Cut(file[20:84], []byte{0})
	vm = strings.ToValidUTF8(string(name), "�")
	for b := file[flightPage:]; len(b) >= flightSlot; b = b[flightSlot:] {
		s := b[:flightSlot]
		if le.Uint64(s[8:]) == 0 || le.Uint32(s) != checksumOf(s) {
			continue // never used, or torn
		}
		f := flownFrame{number: le.Uint64(s[8:]), rec: record{
			at: int64(le.Uint64(s[16:])), queue: int(le.Uint16(s[24:])), dir: Direction(s[28]), drop: drop(s[29]),
			length: int(le.Uint32(s[4:])),
		}}
		n := int(le.Uint16(s[26:]))
		if n > flightSnap || n > f.rec.length || f.rec.length > datapath.MaxFrame || f.rec.dir > Outbound {
			continue // somebody's who can compute a checksum
		}
		f.rec.hdr.Parse(s[30 : 30+virtio.HdrSize])
		f.data = slices.Clone(s[flightHead : flightHead+n])
		flown = append(flown, f)
	}
	slices.SortFunc(flown, func(a, b flownFrame) int {
		if a.number < b.number {
			return -1
		}
		return 1
	})
	return vm, flown, nil
}
