package vhostuser

import "github.com/culvertnet/culvert/datapath/virtio"

// Feature bits of virtio-net and of virtio (virtio 1.3, 5.1.3 and 6), and the
// one of vhost-user among them. HOST_… is what the guest may leave to us,
// GUEST_… what it takes from us.
const (
	featureCSum             = 1 << 0
	featureGuestCSum        = 1 << 1
	featureMTU              = 1 << 3
	featureGuestTSO4        = 1 << 7
	featureGuestTSO6        = 1 << 8
	featureGuestECN         = 1 << 9
	featureHostTSO4         = 1 << 11
	featureHostTSO6         = 1 << 12
	featureHostECN          = 1 << 13
	featureMrgRxBuf         = 1 << 15
	featureMQ               = 1 << 22
	featureIndirectDesc     = 1 << 28
	featureEventIdx         = 1 << 29
	featureProtocolFeatures = 1 << 30
	featureVersion1         = 1 << 32
)

// baseFeatures is what we offer, MQ left out: nothing that the datapath does not
// do. No USO, which nothing behind us makes or takes; no LOG_ALL, so no live
// migration; no control queue, which is the front-end's own.
const baseFeatures = featureCSum | featureGuestCSum | featureMTU |
	featureGuestTSO4 | featureGuestTSO6 | featureGuestECN |
	featureHostTSO4 | featureHostTSO6 | featureHostECN |
	featureMrgRxBuf | featureIndirectDesc | featureEventIdx | featureProtocolFeatures | featureVersion1

// Protocol feature bits: what the messages may be.
const (
	protocolMQ                = 1 << 0
	protocolReplyAck          = 1 << 3
	protocolMTU               = 1 << 4
	protocolResetDevice       = 1 << 13
	protocolConfigureMemSlots = 1 << 15
	protocolStatus            = 1 << 16

	protocolFeatures = protocolMQ | protocolReplyAck | protocolMTU | protocolResetDevice |
		protocolConfigureMemSlots | protocolStatus
)

// toGuest returns what the guest takes from us. Each TSO needs the checksum, and
// ECN a TSO (virtio 1.3, 5.1.3.1): without, a bit means nothing.
func toGuest(features uint64) virtio.Offloads {
	return offloads(features, featureGuestCSum, featureGuestTSO4, featureGuestTSO6, featureGuestECN)
}

// fromGuest returns what the guest may leave to us.
func fromGuest(features uint64) virtio.Offloads {
	return offloads(features, featureCSum, featureHostTSO4, featureHostTSO6, featureHostECN)
}

func offloads(features, csum, tso4, tso6, ecn uint64) (o virtio.Offloads) {
	if features&csum == 0 {
		return 0
	}
	o = virtio.OffloadCSum
	if features&tso4 != 0 {
		o |= virtio.OffloadTSO4
	}
	if features&tso6 != 0 {
		o |= virtio.OffloadTSO6
	}
	if features&ecn != 0 && features&(tso4|tso6) != 0 {
		o |= virtio.OffloadECN
	}
	return o
}

// headerForm returns how long the virtio-net header is: it has num_buffers with
// either of two features (virtio 1.3, 5.1.6.1).
func headerForm(features uint64) int {
	if features&(featureVersion1|featureMrgRxBuf) != 0 {
		return virtio.HdrSizeMrgBuf
	}
	return virtio.HdrSize
}
