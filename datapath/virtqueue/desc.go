package virtqueue

import "encoding/binary"

// Flags of a descriptor (virtio 1.3, 2.7.5). Others are ignored.
const (
	descFNext     = 1
	descFWrite    = 2
	descFIndirect = 4
)

// A desc is our copy of a descriptor.
type desc struct {
	addr  uint64 // guest-physical
	len   uint32
	flags uint16
	next  uint16
}

// loadDesc copies descriptor i out of a table, each byte once. Nothing looks at
// it in guest memory again.
func loadDesc(table []byte, i int) desc {
	b := table[descSize*i : descSize*i+descSize]
	lo, hi := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	return desc{addr: lo, len: uint32(hi), flags: uint16(hi >> 32), next: uint16(hi >> 48)}
}

// walk follows the chain that begins at descriptor head and fills c with it. A
// chain is zero or more descriptors of the queue's own table, of which the last
// may refer to an indirect table that holds the rest, from its entry 0 on
// (virtio 1.3, 2.7.5.3).
func (q *Queue) walk(c *Chain, head uint16) error {
	c.reset(head)
	table, indirect := q.desc, false
	i, left := int(head), len(q.desc)/descSize // left: an honest chain passes no descriptor twice
	for {
		if left == 0 {
			return c.refuse(ErrLoop)
		}
		left--
		d := loadDesc(table, i)
		if d.flags&descFIndirect != 0 {
			switch {
			case !q.features.Indirect:
				return c.refuse(ErrNotNegotiated)
			case indirect:
				return c.refuse(ErrNested)
			case d.flags&descFNext != 0:
				return c.refuse(ErrIndirectNext)
			case d.len == 0 || d.len%descSize != 0 || d.len > descSize*MaxSegments:
				return c.refuse(ErrTable)
			}
			var err error
			if table, err = c.gather(q.mem, d.addr, d.len); err != nil {
				return c.refuse(ErrFault)
			}
			indirect, i, left = true, 0, len(table)/descSize
			continue // WRITE says nothing here: each entry has its own
		}
		if err := c.add(q.mem, d); err != 0 {
			return c.refuse(err)
		}
		if d.flags&descFNext == 0 {
			break
		}
		if i = int(d.next); i >= len(table)/descSize {
			return c.refuse(ErrNext)
		}
	}
	return c.done()
}
