package kube

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/util/validation"
)

// What is kept of one Service. More is left out, and a debug line says so: the
// cluster is the guest's, and none of these is a number that people reach.
const (
	maxPorts        = 1024
	maxIngress      = 64
	maxSourceRanges = 256
	maxText         = 253 // bytes in a text: the longest DNS name
	maxProtocol     = 16
)

// An object is core/v1's Service as far as it is read. It is a type of our own
// because a list of the library's takes a hundred times the memory of the bytes
// it is decoded from, when the bytes are chosen for that.
type object struct {
	Metadata struct {
		Namespace         string    `json:"namespace"`
		Name              string    `json:"name"`
		UID               string    `json:"uid"`
		CreationTimestamp time.Time `json:"creationTimestamp"`
	} `json:"metadata"`
	Spec struct {
		Type                     string         `json:"type"`
		Ports                    atMost[port]   `json:"ports"`
		LoadBalancerSourceRanges atMost[string] `json:"loadBalancerSourceRanges"`
	} `json:"spec"`
	Status struct {
		LoadBalancer struct {
			Ingress atMost[ingress] `json:"ingress"`
		} `json:"loadBalancer"`
	} `json:"status"`
}

type port struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Port     int64  `json:"port"`
	NodePort int64  `json:"nodePort"`
}

type ingress struct {
	IP       string `json:"ip"`
	Hostname string `json:"hostname"`
	IPMode   string `json:"ipMode"`
}

// atMost is a JSON array of which the first entries are decoded, as many as
// maxPorts, the largest of the bounds, and the others are counted.
type atMost[T any] struct {
	list []T
	more int
}

func (a *atMost[T]) UnmarshalJSON(data []byte) error {
	*a = atMost[T]{}
	if bytes.Equal(data, []byte("null")) {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil {
		return err
	} else if t != json.Delim('[') {
		return &shapeError{t}
	}
	var skipped json.RawMessage
	for d.More() {
		if len(a.list) >= maxPorts {
			a.more++
			if err := d.Decode(&skipped); err != nil {
				return err
			}
			continue
		}
		var entry T
		if err := d.Decode(&entry); err != nil {
			return err
		}
		a.list = append(a.list, entry)
	}
	return nil
}

// service checks o and makes a Service of it. What is left out is in left, for
// a debug line; ok says whether anything remains.
func (o *object) service() (s Service, left []string, ok bool) {
	m := &o.Metadata
	for _, name := range []string{m.Namespace, m.Name} {
		if len(validation.IsDNS1123Label(name)) > 0 {
			return Service{}, []string{fmt.Sprintf("the Service: its name %.*q is no label", maxText, name)}, false
		}
	}
	if len(m.UID) > maxText {
		return Service{}, []string{"the Service: its UID is too long"}, false
	}
	s = Service{
		Namespace: m.Namespace, Name: m.Name, UID: m.UID,
		Created:      m.CreationTimestamp.Truncate(time.Second),
		LoadBalancer: o.Spec.Type == "LoadBalancer",
	}
	if !s.LoadBalancer {
		return s, nil, true
	}
	leave := func(n int, what string) {
		if n > 0 {
			left = append(left, fmt.Sprintf("%d %s", n, what))
		}
	}
	bad := 0
	for _, p := range o.Spec.Ports.list {
		if q, ok := p.port(); ok {
			s.Ports = append(s.Ports, q)
		} else {
			bad++
		}
	}
	leave(bad, "ports with impossible numbers or names")
	leave(o.Spec.Ports.more, "ports too many")

	entries, more := o.Status.LoadBalancer.Ingress.first(maxIngress)
	bad = 0
	for _, i := range entries {
		if !plain(i.IP) || !plain(i.Hostname) || !plain(i.IPMode) {
			bad++
			continue
		}
		s.Ingress = append(s.Ingress, Ingress{IP: i.IP, Hostname: i.Hostname, Mode: i.IPMode})
	}
	leave(bad, "ingress entries that are no text")
	leave(more, "ingress entries too many")

	// Ranges say who may connect. One that is left out lets fewer in, but none at
	// all would let everybody in: what is no range stays, as something that is none.
	ranges, more := o.Spec.LoadBalancerSourceRanges.first(maxSourceRanges)
	for _, r := range ranges {
		if !plain(r) {
			r = "unreadable"
		}
		s.SourceRanges = append(s.SourceRanges, r)
	}
	leave(more, "source ranges too many")
	return s, left, true
}

// port is p as a Port, if its numbers are port numbers (C-40).
func (p port) port() (Port, bool) {
	if p.Port < 1 || p.Port > math.MaxUint16 || p.NodePort < 0 || p.NodePort > math.MaxUint16 {
		return Port{}, false
	}
	if p.Name != "" && len(validation.IsDNS1123Label(p.Name)) > 0 {
		return Port{}, false
	}
	if p.Protocol == "" { // as the API server's defaults have it
		p.Protocol = "TCP"
	}
	if len(p.Protocol) > maxProtocol || strings.ContainsFunc(p.Protocol, func(r rune) bool {
		return (r < 'A' || r > 'Z') && (r < '0' || r > '9')
	}) {
		return Port{}, false
	}
	return Port{Name: p.Name, Protocol: p.Protocol, Number: uint16(p.Port), NodePort: uint16(p.NodePort)}, true
}

// plain says whether text from the guest can be kept and shown.
func plain(text string) bool {
	return len(text) <= maxText && !strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
}

// first is the first n entries, and how many there are beyond them.
func (a atMost[T]) first(n int) ([]T, int) {
	n = min(n, len(a.list))
	return a.list[:n], len(a.list) - n + a.more
}

// size is what a Service counts towards maxEntries.
func (s *Service) size() int {
	return 1 + len(s.Ports) + len(s.Ingress) + len(s.SourceRanges)
}

// A shapeError is a JSON value that is no list.
type shapeError struct{ got json.Token }

func (e *shapeError) Error() string { return fmt.Sprintf("%.63v where a list should be", e.got) }
