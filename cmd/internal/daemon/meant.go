package daemon

import (
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/reconcile"
	"github.com/culvertnet/culvert/stack/listener"
)

// meant says which of rows a person means by text: an owner by its whole id; a
// container by its name or the beginning of its id (C-36); a Service by
// namespace/name, or by its name; a publish of the config or the CLI by its
// text or the first parts of it, so by its host port; any row by its host
// address and port. The first of these that fits anything is meant.
func (d *Daemon) meant(text string, rows []api.Listener) (func(api.Listener) bool, error) {
	fits := func(match func(api.Listener) bool) bool {
		for _, r := range rows {
			if match(r) {
				return true
			}
		}
		return false
	}
	exact := func(r api.Listener) bool { return r.Owner.ID == text }
	if fits(exact) {
		return exact, nil
	}
	owners, err := d.loop.Names().Resolve(text)
	if err != nil && !errors.Is(err, reconcile.ErrNoOwner) {
		return nil, &api.Problem{Status: http.StatusConflict, Detail: err.Error()}
	}
	if len(owners) > 0 {
		is := make(map[api.Owner]bool, len(owners))
		for _, o := range owners {
			is[ownerOf(o)] = true
		}
		return func(r api.Listener) bool { return is[r.Owner] }, nil
	}
	service := func(r api.Listener) bool {
		name, _, _ := strings.Cut(r.Owner.ID, ":")
		_, bare, _ := strings.Cut(name, "/")
		return r.Owner.Kind == listener.KindKubernetes && (name == text || bare == text)
	}
	if fits(service) {
		return service, nil
	}
	return func(r api.Listener) bool {
		at := strings.TrimSuffix(text, "/"+r.Protocol)
		if r.Host == at || slices.Contains(r.Bound, at) {
			return true
		}
		rest, begins := strings.CutPrefix(r.Owner.ID, text)
		return begins && text != "" && (r.Owner.Kind == listener.KindConfig || r.Owner.Kind == listener.KindCLI) && strings.ContainsAny(rest[:1], ":/")
	}, nil
}
