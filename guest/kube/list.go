package kube

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// pageSize is how many Services are asked for at a time. Servers may send more.
const pageSize = 500

// maxToken is how long what is sent back may be, in bytes.
const maxToken = 4 << 10

// A set is the Services of a cluster by name, within bounds.
type set struct {
	services map[name]*Service
	entries  int // see maxEntries
}

type name struct{ namespace, name string }

func newSet() *set { return &set{services: make(map[name]*Service)} }

// put adds s in place of one of the same name. It fails when that is too much.
func (s *set) put(service *Service) error {
	key := name{service.Namespace, service.Name}
	s.remove(key)
	if len(s.services) >= maxServices {
		return fmt.Errorf("more than %d Services", maxServices)
	}
	if s.entries+service.size() > maxEntries {
		return fmt.Errorf("more than %d ports and addresses of Services", maxEntries)
	}
	s.services[key] = service
	s.entries += service.size()
	return nil
}

func (s *set) remove(key name) {
	if old := s.services[key]; old != nil {
		s.entries -= old.size()
		delete(s.services, key)
	}
}

// all is a slice of its own.
func (s *set) all() []Service {
	list := make([]Service, 0, len(s.services))
	for _, service := range s.services {
		list = append(list, *service)
	}
	return list
}

func (s *set) equal(other *set) bool {
	if other == nil || len(s.services) != len(other.services) {
		return false
	}
	for key, a := range s.services {
		b := other.services[key]
		if b == nil || !a.equal(b) {
			return false
		}
	}
	return true
}

func (s *Service) equal(o *Service) bool {
	return s.Namespace == o.Namespace && s.Name == o.Name && s.UID == o.UID && s.Created.Equal(o.Created) &&
		s.LoadBalancer == o.LoadBalancer && slices.Equal(s.Ports, o.Ports) && slices.Equal(s.Ingress, o.Ingress) &&
		slices.Equal(s.SourceRanges, o.SourceRanges)
}

// list asks for all Services, and returns them with the resource version at
// which they were so. It is all of them or an error.
func (c *Client) list(ctx context.Context) (*set, string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	services := newSet()
	query := url.Values{"limit": {strconv.Itoa(pageSize)}}
	for range maxPages {
		meta, err := c.page(ctx, query, services)
		if err != nil {
			return nil, "", err
		}
		if meta.Continue == "" {
			return services, meta.ResourceVersion, nil
		}
		if len(meta.Continue) > maxToken {
			return nil, "", fmt.Errorf("a continue token of %d bytes", len(meta.Continue))
		}
		query.Set("continue", meta.Continue)
	}
	return nil, "", fmt.Errorf("a list of more than %d pages", maxPages)
}

func (c *Client) page(ctx context.Context, query url.Values, into *set) (listMeta, error) {
	body, err := c.get(ctx, query)
	if err != nil {
		return listMeta{}, err
	}
	defer body.Close()
	return newValues(body, maxAnswer).page(func(o *object, err error) error {
		if err != nil {
			c.log.Debug("left out a Service that is none", "error", clean(err.Error()))
			return nil
		}
		if service := c.service(o); service != nil {
			return into.put(service)
		}
		return nil
	})
}

// service checks o; nil means that nothing of it can be used.
func (c *Client) service(o *object) *Service {
	service, left, ok := o.service()
	if len(left) > 0 {
		c.log.Debug("left out of what the cluster says", "namespace", service.Namespace, "name", service.Name, "left", strings.Join(left, ", "))
	}
	if !ok {
		return nil
	}
	return &service
}
