package vhostuser

import (
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/datapath/virtqueue"
)

// mustMemfd makes a file of n bytes; it is the one who takes the descriptor over
// who closes it.
func mustMemfd(t testing.TB, n int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, n))
	return fd
}

const page = 4096

// TestMemTable: both look-ups find what each region has, from its first byte to
// its last, in whatever order regions come, and nothing beside them.
func TestMemTable(t *testing.T) {
	datapathtest.Leaks(t)
	file := mustMemfd(t, 8*page)
	_, err := unix.Pwrite(file, []byte("low"), 0)
	require.NoError(t, err)
	_, err = unix.Pwrite(file, []byte("mid"), 4*page)
	require.NoError(t, err)
	dup := func() int {
		fd, err := unix.FcntlInt(uintptr(file), unix.F_DUPFD_CLOEXEC, 0)
		require.NoError(t, err)
		return fd
	}
	var table memTable
	mid := region{gpa: 0x10000, size: 2 * page, user: 0x7000_0000, offset: 4 * page}
	low := region{gpa: 0x1000, size: page, user: 0x9000_0000, offset: 0}
	next := region{gpa: 0x12000, size: page, user: 0x5000_0000, offset: 7 * page} // touches mid
	require.NoError(t, table.set([]region{mid, low}, []int{dup(), dup()}))
	require.NoError(t, table.add(next, dup()))
	require.NoError(t, unix.Close(file), "mappings need no descriptor")

	for range 2 { // the second time from the last hit
		for _, test := range []struct {
			gpa  uint64
			n    uint32
			want int // bytes; 0 is a fault
		}{
			{0, 1, 0}, {0xfff, 1, 0}, {0x1000, 3, 3}, {0x1000, page, page}, {0x1000, page + 1, page},
			{0x1fff, 100, 1}, {0x2000, 1, 0}, {0xffff, 1, 0}, {0x10000, 3, 3}, {0x11fff, 2, 1}, {0x12000, 2, 2},
			{0x12fff, math.MaxUint32, 1}, {0x13000, 1, 0}, {math.MaxUint64, 1, 0}, {math.MaxUint64 - 4, math.MaxUint32, 0},
		} {
			b, err := table.Slice(test.gpa, test.n)
			if test.want == 0 {
				assert.ErrorIs(t, err, virtqueue.ErrFault, "%#x", test.gpa)
				assert.Nil(t, b)
				continue
			}
			require.NoError(t, err, "%#x", test.gpa)
			assert.Len(t, b, test.want, "%#x", test.gpa)
			assert.Equal(t, len(b), cap(b), "an append must not reach what lies behind")
		}
	}
	b, err := table.Slice(0x1000, 3)
	require.NoError(t, err)
	assert.Equal(t, "low", string(b))
	b, err = table.Slice(0x10000, 3)
	require.NoError(t, err)
	assert.Equal(t, "mid", string(b))

	b, err = table.atUser(0x7000_0000, 2*page)
	require.NoError(t, err)
	assert.Equal(t, "mid", string(b[:3]))
	for _, bad := range []struct {
		user uint64
		n    int
	}{
		{0x7000_0000, 2*page + 1}, {0x6fff_ffff, 1}, {0x7000_0000 + 2*page, 1}, {math.MaxUint64, 2},
		{0x1000, 1}, // a guest-physical address
	} {
		_, err := table.atUser(bad.user, bad.n)
		assert.ErrorIs(t, err, errMemory, "%#x", bad.user)
	}

	// As in MAP_SHARED: what one side writes is there for the other.
	copy(b, "new")
	b, err = table.Slice(0x10000, 3)
	require.NoError(t, err)
	assert.Equal(t, "new", string(b))

	require.NoError(t, table.remove(region{gpa: mid.gpa, size: mid.size, user: mid.user}), "the offset is not looked at")
	assert.ErrorIs(t, table.remove(mid), errMemory)
	assert.ErrorIs(t, table.remove(region{gpa: low.gpa, size: low.size - 1, user: low.user}), errMemory)
	_, err = table.Slice(0x10000, 1)
	assert.ErrorIs(t, err, virtqueue.ErrFault)
	_, err = table.Slice(0x12000, 1)
	assert.NoError(t, err)
	table.clear()
	_, err = table.Slice(0x1000, 1)
	assert.ErrorIs(t, err, virtqueue.ErrFault)
}

// TestMemTableRefuses: what cannot be memory is refused, its descriptor closed.
func TestMemTableRefuses(t *testing.T) {
	datapathtest.Leaks(t)
	for name, r := range map[string]region{
		"empty":                  {gpa: 0, size: 0, user: 0},
		"wraps at gpa":           {gpa: math.MaxUint64 - 10, size: page},
		"wraps at user":          {user: math.MaxUint64 - 10, size: page},
		"wraps at offset":        {offset: math.MaxUint64 - 10, size: page},
		"all there is":           {size: math.MaxUint64},
		"half of all":            {size: 1 << 63},
		"beyond the file":        {size: 4*page + 1},
		"offset beyond the file": {size: page, offset: 4 * page},
		"overlaps before":        {gpa: 0x100000 - page + 1, size: page},
		"overlaps behind":        {gpa: 0x100fff, size: page},
		"overlaps all":           {gpa: 0xf0000, size: 2 * page, offset: 0, user: 5},
		"the same again":         {gpa: 0x100000, size: page},
	} {
		t.Run(name, func(t *testing.T) {
			var table memTable
			require.NoError(t, table.add(region{gpa: 0x100000, size: page, user: 0x100000}, mustMemfd(t, page)))
			defer table.clear()
			if name == "overlaps all" {
				r.gpa = 0x100000 - page
			}
			require.ErrorIs(t, table.add(r, mustMemfd(t, 4*page)), errMemory)
			assert.Len(t, table.regions, 1)
			require.ErrorIs(t, table.set([]region{{size: page}, r, {gpa: 1 << 40, size: page}},
				[]int{mustMemfd(t, page), mustMemfd(t, page-1), mustMemfd(t, page)}), errMemory)
			assert.Empty(t, table.regions, "a table half set")
		})
	}
	var table memTable
	require.ErrorIs(t, table.add(region{size: page}, -1), errMemory)
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	require.NoError(t, f.Truncate(page))
	fd, err := unix.Open(f.Name(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.ErrorIs(t, table.add(region{size: page}, fd), unix.EACCES, "read-only")
}

// TestMemTableAgain: a region that is added twice is there until it has been
// removed twice, and is what the second descriptor is.
func TestMemTableAgain(t *testing.T) {
	datapathtest.Leaks(t)
	var table memTable
	r := region{gpa: 0x1000, size: page, user: 0x5000}
	require.NoError(t, table.add(r, mustMemfd(t, page)))
	second := mustMemfd(t, page)
	_, err := unix.Pwrite(second, []byte("second"), 0)
	require.NoError(t, err)
	require.NoError(t, table.add(r, second))
	for range 2 {
		b, err := table.Slice(0x1000, 6)
		require.NoError(t, err)
		require.Equal(t, "second", string(b))
		require.NoError(t, table.remove(r))
	}
	_, err = table.Slice(0x1000, 6)
	require.ErrorIs(t, err, virtqueue.ErrFault)
	require.ErrorIs(t, table.remove(r), errMemory)
}

// TestMemTableBounded: regions are limited in number.
func TestMemTableBounded(t *testing.T) {
	datapathtest.Leaks(t)
	var table memTable
	defer table.clear()
	for i := range uint64(maxRegions) {
		require.NoError(t, table.add(region{gpa: i << 20, size: page, user: i << 20}, mustMemfd(t, page)))
	}
	require.ErrorContains(t, table.add(region{gpa: 1 << 40, size: page, user: 1 << 40}, mustMemfd(t, page)), "more than 256 regions")
}
