package trace

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// frame6 makes the beginning of an IPv6 frame, with a hop-by-hop header.
func frame6(proto uint8, srcPort, dstPort uint16) []byte {
	b := append(make([]byte, 12), 0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, 0, 64)
	src, dst := netip.MustParseAddr("fd00::1").As16(), netip.MustParseAddr("fd00::2").As16()
	b = append(append(b, src[:]...), dst[:]...)
	b = append(b, proto, 0, 0, 0, 0, 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, srcPort), dstPort), make([]byte, 28)...)
}

func TestFilter(t *testing.T) {
	tcp, _ := frame4(protoTCP, hostAddr, guestAddr, 100, false)
	udp, _ := frame4(protoUDP, guestAddr, netip.MustParseAddrPort("10.0.2.1:53"), 0, false)
	icmp, _ := frame4(protoICMP, guestAddr, hostAddr, 0, false)
	later, _ := frame4(protoTCP, hostAddr, guestAddr, 100, false)
	later[21] = 7 // a later fragment: what stands where its ports would be is payload
	arp := append(append(append([]byte(nil), guestMAC...), hostMAC...), 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
	arp = append(append(append(arp, hostMAC...), 10, 0, 2, 1, 0, 0, 0, 0, 0, 0), 10, 0, 2, 2)
	vlan := append(append(append([]byte(nil), tcp[:12]...), 0x81, 0, 0, 5), tcp[12:]...)
	frames := map[string][]byte{
		"tcp": tcp, "udp": udp, "icmp": icmp, "fragment": later, "arp": arp, "vlan": vlan, "tcp6": frame6(protoTCP, 80, 4000), "runt": {1, 2, 3},
	}
	for text, want := range map[string]string{
		"tcp":                           "tcp fragment tcp6",
		"udp":                           "udp",
		"icmp":                          "icmp",
		"arp":                           "arp",
		"ip":                            "tcp udp icmp fragment",
		"ip6":                           "tcp6",
		"host 10.0.2.2":                 "tcp udp icmp fragment arp",
		"10.0.2.2":                      "tcp udp icmp fragment arp",
		"src host 10.0.2.2":             "udp icmp",
		"dst 10.0.2.2":                  "tcp fragment arp",
		"src and dst host 10.0.2.2":     "",
		"src or dst host 10.0.2.2":      "tcp udp icmp fragment arp",
		"arp host 10.0.2.2":             "arp",
		"ip host 10.0.2.2":              "tcp udp icmp fragment",
		"host fd00::1":                  "tcp6",
		"net 10.0.2.0/24":               "tcp udp icmp fragment arp",
		"net 10.0":                      "tcp udp icmp fragment arp",
		"net 192.168.0.0/16":            "",
		"dst net fd00::/8":              "tcp6",
		"port 80":                       "tcp udp tcp6",
		"tcp port 80":                   "tcp tcp6",
		"tcp dst port 80":               "tcp",
		"src port 80":                   "udp tcp6",
		"port 53 or 40000":              "tcp udp",
		"portrange 4000-4100":           "tcp6",
		"ether host 02:00:00:00:00:02":  "tcp udp icmp fragment arp vlan",
		"ether src 02:00:00:00:00:02":   "",
		"not ip":                        "arp tcp6 vlan runt",
		"!ip && !(ip6 || arp)":          "vlan runt",
		"tcp or udp and src port 80":    "udp tcp6", // (tcp or udp) and …, from left to right
		"udp and src port 80 or icmp":   "udp icmp",
		"less 20":                       "runt",
		"greater 100":                   "tcp fragment vlan",
		"inbound":                       "tcp udp icmp fragment arp vlan tcp6 runt",
		"outbound":                      "",
		"tcp and not outbound and ip":   "tcp fragment",
		"broadcast or ether multicast":  "",
		"icmp6":                         "",
		"ip and tcp portrange 79-81":    "tcp",
		"(tcp and port 80)and(not(ip))": "tcp6",
	} {
		f, err := ParseFilter(text)
		if !assert.NoError(t, err, text) {
			continue
		}
		var got []string
		for _, name := range strings.Fields("tcp udp icmp fragment arp vlan tcp6 runt") {
			h := parseHeaders(frames[name])
			if f.match(&h, len(frames[name]), Inbound) {
				got = append(got, name)
			}
		}
		assert.ElementsMatch(t, strings.Fields(want), got, text)
	}
}

// TestFilterErrors: a filter that cannot be meant says which word of it, in one
// line.
func TestFilterErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                       "filter: it ends where a question is missing",
		"tcp port":               "filter: it ends where a port is missing",
		"port http":              `filter: "http" is no port's number`,
		"port 80-90":             `filter: "80-90" is no port's number`,
		"portrange 90-80":        `filter: "90-80" is no range of ports such as 6000-6009`,
		"port 65536":             `filter: "65536" is no port's number`,
		"host web":               `filter: "web" is no IP address`,
		"net 10.0.2.0/33":        `filter: "10.0.2.0/33" is no network such as 10.0.2.0/24`,
		"ether host 10.0.2.2":    `filter: "10.0.2.2" is no Ethernet address`,
		"arp port 5":             `filter: "arp port 5": arp has no ports`,
		"tcp udp":                `filter: "udp" stands where the filter should end, or needs an "and" before it`,
		"(tcp":                   `filter: a "(" has no ")"`,
		"(tcp udp)":              `filter: "udp" stands where a ")" should, or needs an "and" before it`,
		"tcp)":                   `filter: ")" stands where the filter should end, or needs an "and" before it`,
		"tcp and":                "filter: it ends where a question is missing",
		"tcp[13] & 2 != 0":       `filter: "tcp[13]" is no word of it: see "culvert trace --help"`,
		"vlan 5":                 `filter: "vlan" is no word of it: see "culvert trace --help"`,
		"less x":                 `filter: "x" is no length in bytes`,
		strings.Repeat("(", 40):  "filter: \"(\" lies deeper than 32 parentheses and nots",
		strings.Repeat("x", 3e3): "filter: 3000 characters are more than 2048",
	} {
		_, err := ParseFilter(text)
		assert.EqualError(t, err, want, text)
	}
}

func FuzzFilter(f *testing.F) {
	f.Add("tcp port 80 and not (host 10.0.2.2 or ether broadcast)", []byte{1, 2, 3})
	tcp, _ := frame4(protoTCP, hostAddr, guestAddr, 10, false)
	f.Add("src or dst portrange 1-2 or 3-4 && less 9 || inbound", tcp)
	f.Add("ip6 src net fd00::/8", frame6(44, 0, 0))
	f.Fuzz(func(t *testing.T, text string, frame []byte) {
		filter, err := ParseFilter(text)
		if err != nil {
			assert.Nil(t, filter)
			return
		}
		not, err := ParseFilter("not (" + text + ")")
		h := parseHeaders(frame)
		if err == nil { // it may have become too long or too deep
			require.NotEqual(t, filter.match(&h, len(frame), Inbound), not.match(&h, len(frame), Inbound))
		}
	})
}

// FuzzLine: whatever a guest sends is one line, without control characters.
func FuzzLine(f *testing.F) {
	tcp, _ := frame4(protoTCP, hostAddr, guestAddr, 10, false)
	for _, b := range [][]byte{nil, {1}, tcp, tcp[:40], frame6(protoICMP6, 0x8700, 0), frame6(44, 1, 2)} {
		f.Add(b, 60, "drop \x1b[31m\n")
	}
	f.Fuzz(func(t *testing.T, data []byte, length int, comment string) {
		p := Packet{Data: data, Length: length, Dir: Direction(length), Comments: []string{comment}}
		for _, i := range []Interface{{Name: "vm/q0"}, {Name: "vm/drops", Text: true}} {
			for _, r := range p.Line(i) {
				require.True(t, r >= ' ' && r != 0x7f, "%q", p.Line(i))
			}
		}
	})
}
