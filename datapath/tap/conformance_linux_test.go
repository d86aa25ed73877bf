package tap

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/culvertnet/culvert/datapath"
	"github.com/culvertnet/culvert/datapath/datapathtest"
)

func TestConformance(t *testing.T) {
	t.Run("InterfaceDeleted", func(t *testing.T) { datapathtest.Conformance(t, opener(Config{})) })
	t.Run("LargeMTU", func(t *testing.T) { datapathtest.Conformance(t, opener(Config{MTU: maxMTU})) })
	t.Run("Queues", func(t *testing.T) { datapathtest.Conformance(t, opener(Config{Queues: 3})) })
	t.Run("NamespaceDeleted", func(t *testing.T) {
		datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
			ns := newGuestNS(t)
			a := mustOpen(t, ns, Config{Queues: 2})
			p := newPeer(t, ns, false)
			p.gone = func() error {
				ns.Close()
				return p.sock.Close() // it holds the namespace too
			}
			return a, p
		})
	})
	t.Run("Adopted", func(t *testing.T) {
		datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
			ns := newGuestNS(t)
			mustMakePersistent(t, ns, netlink.TUNTAP_DEFAULTS)
			a := mustOpen(t, ns, Config{})
			p := newPeer(t, ns, false)
			p.gone = func() error { return deleteLink(ns) }
			return a, p
		})
	})
	t.Run("AdoptedNamespaceDeleted", func(t *testing.T) {
		datapathtest.Conformance(t, func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
			ns := newGuestNS(t)
			mustMakePersistent(t, ns, netlink.TUNTAP_MULTI_QUEUE_DEFAULTS)
			a := mustOpen(t, ns, Config{Queues: 2})
			p := newPeer(t, ns, false)
			p.gone = func() error {
				ns.Close()
				return p.sock.Close()
			}
			return a, p
		})
	})
}

func opener(cfg Config) func(*testing.T) (datapath.Attachment, datapathtest.Peer) {
	return func(t *testing.T) (datapath.Attachment, datapathtest.Peer) {
		ns := newGuestNS(t)
		a := mustOpen(t, ns, cfg)
		p := newPeer(t, ns, false)
		p.gone = func() error { return errors.Join(deleteLink(ns), p.sock.Close()) }
		return a, p
	}
}
