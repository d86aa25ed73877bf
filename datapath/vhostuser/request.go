package vhostuser

import "strconv"

// A request is what a message asks for. The numbers are the protocol's; those
// that are left out here are refused by their number.
type request uint32

const (
	reqGetFeatures         request = 1
	reqSetFeatures         request = 2
	reqSetOwner            request = 3
	reqResetOwner          request = 4
	reqSetMemTable         request = 5
	reqSetVringNum         request = 8
	reqSetVringAddr        request = 9
	reqSetVringBase        request = 10
	reqGetVringBase        request = 11
	reqSetVringKick        request = 12
	reqSetVringCall        request = 13
	reqSetVringErr         request = 14
	reqGetProtocolFeatures request = 15
	reqSetProtocolFeatures request = 16
	reqGetQueueNum         request = 17
	reqSetVringEnable      request = 18
	reqNetSetMTU           request = 20
	reqResetDevice         request = 34
	reqGetMaxMemSlots      request = 36
	reqAddMemReg           request = 37
	reqRemMemReg           request = 38
	reqSetStatus           request = 39
	reqGetStatus           request = 40
)

// A rule is what a request has to look like, and who serves it.
type rule struct {
	name  string
	size  int    // bytes of payload; variable if negative
	fds   int    // at most
	needs uint64 // protocol feature
	// serve does what is asked, takes the descriptors it keeps, and returns the
	// payload of the answer, nil where the request has none of its own.
	serve func(s *session, m *message) ([]byte, error)
}

var rules = map[request]rule{
	reqGetFeatures:         {"GET_FEATURES", 0, 0, 0, (*session).getFeatures},
	reqSetFeatures:         {"SET_FEATURES", 8, 0, 0, (*session).setFeatures},
	reqSetOwner:            {"SET_OWNER", 0, 0, 0, (*session).setOwner},
	reqResetOwner:          {"RESET_OWNER", 0, 0, 0, (*session).resetOwner},
	reqGetProtocolFeatures: {"GET_PROTOCOL_FEATURES", 0, 0, 0, (*session).getProtocolFeatures},
	reqSetProtocolFeatures: {"SET_PROTOCOL_FEATURES", 8, 0, 0, (*session).setProtocolFeatures},
	reqGetQueueNum:         {"GET_QUEUE_NUM", 0, 0, protocolMQ, (*session).getQueueNum},
	reqNetSetMTU:           {"NET_SET_MTU", 8, 0, protocolMTU, (*session).netSetMTU},

	reqSetMemTable:    {"SET_MEM_TABLE", -1, maxTableRegions, 0, (*session).setMemTable},
	reqGetMaxMemSlots: {"GET_MAX_MEM_SLOTS", 0, 0, protocolConfigureMemSlots, (*session).getMaxMemSlots},
	reqAddMemReg:      {"ADD_MEM_REG", singleRegionSize, 1, protocolConfigureMemSlots, (*session).addMemReg},
	reqRemMemReg:      {"REM_MEM_REG", singleRegionSize, 1, protocolConfigureMemSlots, (*session).remMemReg},

	reqSetVringNum:    {"SET_VRING_NUM", vringStateSize, 0, 0, (*session).setVringNum},
	reqSetVringBase:   {"SET_VRING_BASE", vringStateSize, 0, 0, (*session).setVringBase},
	reqSetVringAddr:   {"SET_VRING_ADDR", vringAddrSize, 0, 0, (*session).setVringAddr},
	reqSetVringKick:   {"SET_VRING_KICK", 8, 1, 0, (*session).setVringKick},
	reqSetVringCall:   {"SET_VRING_CALL", 8, 1, 0, (*session).setVringCall},
	reqSetVringErr:    {"SET_VRING_ERR", 8, 1, 0, (*session).setVringErr},
	reqSetVringEnable: {"SET_VRING_ENABLE", vringStateSize, 0, 0, (*session).setVringEnable},
	reqGetVringBase:   {"GET_VRING_BASE", vringStateSize, 0, 0, (*session).getVringBase},

	reqSetStatus:   {"SET_STATUS", 8, 0, protocolStatus, (*session).setStatus},
	reqGetStatus:   {"GET_STATUS", 0, 0, protocolStatus, (*session).getStatus},
	reqResetDevice: {"RESET_DEVICE", 0, 0, protocolResetDevice, (*session).resetDevice},
}

// String returns the request's name, or its number if it is none of ours.
func (r request) String() string {
	if rule, ok := rules[r]; ok {
		return rule.name
	}
	return "request " + strconv.FormatUint(uint64(r), 10)
}
