package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	answerTimeout = 15 * time.Second // until a connection is there, and an answer begins
	listTimeout   = time.Minute      // a whole listing

	relist     = 10 * time.Minute // C-39: whatever a watch says
	poll       = 2 * time.Second  // C-39: where watching is impossible
	lookAtFile = 10 * time.Second // whether the kubeconfig has changed, while a watch lasts

	// A watch that lasted so long, or that told of a change, was no failure.
	watchHeld = 10 * time.Second

	// The first wait is short, so that one failure costs little; four lists fit
	// into the first ten seconds. The last is as long as a cluster takes to start.
	firstWait   = time.Second
	longestWait = 10 * time.Second

	// Changes are told together when they come together: after a moment, and not
	// more often than so.
	moment  = 20 * time.Millisecond
	spacing = 100 * time.Millisecond
)

// errNoWatch is why a watch did not begin: it is not allowed here.
var errNoWatch = errors.New("watching is not allowed")

// errReload ends a watch because the kubeconfig has changed.
var errReload = errors.New("the kubeconfig has changed")

// Follow tells update of all Services, after each change, until ctx ends; it
// returns ctx's error. Each call has the complete set, in a slice of its own,
// or the reason why there is none. Calls come from the goroutine of Follow, one
// after the other; while one lasts nothing else happens.
func (c *Client) Follow(ctx context.Context, update func(Update)) error {
	f := &follower{Client: c, update: update}
	var err error
	for ctx.Err() == nil {
		if err != nil { // the reason may be in the file, and so may the cure
			err = c.load()
		}
		if err == nil {
			err = f.round(ctx)
		}
		if err != nil && ctx.Err() == nil {
			f.fail(err)
			f.wait(ctx, f.failures)
		}
	}
	return ctx.Err()
}

// A follower is one call of Follow.
type follower struct {
	*Client
	update   func(Update)
	failures int
	told     *set      // what update was told last; nil when that was an error
	at       time.Time // when
}

// round is a list and what follows from it: a watch, or polling where there is
// no watching. It returns nil when it is time to list anew, and otherwise what
// has failed.
func (f *follower) round(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, relist)
	defer cancel()
	services, version, err := f.list(ctx)
	if err != nil {
		return f.sentence(err)
	}
	f.tell(services)
	err = f.watch(ctx, services, version)
	for errors.Is(err, errNoWatch) {
		f.failures = 0
		if !sleep(ctx, poll) || f.conf.changed(f.path) {
			err = errReload
			break
		}
		if services, _, listErr := f.list(ctx); listErr != nil {
			err = listErr
		} else if !services.equal(f.told) {
			f.tell(services)
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil // ten minutes are over, or all is
	case errors.Is(err, errReload):
		return f.load()
	case err != nil:
		return f.sentence(err)
	}
	return nil
}

// tell tells of services, and keeps nothing of the slice it gives away.
func (f *follower) tell(services *set) {
	f.told, f.at = services, time.Now()
	f.update(Update{Services: services.all()})
}

// fail tells of err. What fails after a list that succeeded is counted on from
// what failed before it: only a watch that held, or polling, begins anew.
func (f *follower) fail(err error) {
	f.failures++
	f.told = nil
	f.update(Update{Err: err, Failures: f.failures})
}

// wait is the pause after that many failures in a row.
func (f *follower) wait(ctx context.Context, failures int) {
	d := min(firstWait<<min(failures-1, 10), longestWait)
	sleep(ctx, d+rand.N(d/10)) // daemons that lost one server do not return together
}

// sleep says whether it lasted d: ctx ends it sooner.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// watch applies changes from version on to services and tells of them, until the
// watch ends. It ends without an error when the server has closed one that held.
func (f *follower) watch(ctx context.Context, services *set, version string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begin := time.Now()
	body, err := f.get(ctx, url.Values{
		"watch": {"true"}, "resourceVersion": {version}, "allowWatchBookmarks": {"true"},
		"timeoutSeconds": {strconv.Itoa(int(relist / time.Second))},
	})
	if status := (*apierrors.StatusError)(nil); errors.As(err, &status) &&
		(status.ErrStatus.Code == http.StatusForbidden || status.ErrStatus.Code == http.StatusMethodNotAllowed) {
		return fmt.Errorf("%w: %w", errNoWatch, err)
	} else if err != nil {
		return err
	}
	changes := make(chan change)
	ended := make(chan error, 1)
	go func() { ended <- f.read(ctx, body, changes) }()
	defer func() {
		cancel()
		body.Close()
		for range changes { // until read has returned
		}
	}()

	file := time.NewTicker(lookAtFile)
	defer file.Stop()
	var tell <-chan time.Time // while there is something to tell
	for {
		select {
		case change, ok := <-changes:
			if !ok {
				if tell != nil {
					f.tell(services)
				}
				err := <-ended
				if time.Since(begin) >= watchHeld {
					f.failures = 0
					if errors.Is(err, errEnded) {
						return nil
					}
				}
				return err
			}
			f.failures = 0
			if change.bookmark {
				continue
			}
			if err := change.apply(services); err != nil {
				return err
			}
			if tell == nil {
				tell = time.After(max(moment, spacing-time.Since(f.at)))
			}
		case <-tell:
			tell = nil
			f.tell(services)
		case <-file.C:
			if f.conf.changed(f.path) {
				return errReload
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A change is one event of a watch.
type change struct {
	key      name
	service  *Service // nil: it is gone
	bookmark bool
}

func (c change) apply(services *set) error {
	if c.service == nil {
		services.remove(c.key)
		return nil
	}
	return services.put(c.service)
}

// read sends the changes of a watch until it ends or fails, and closes changes.
func (f *follower) read(ctx context.Context, body io.Reader, changes chan<- change) error {
	defer close(changes)
	v := newValues(body, -1)
	for {
		e, err := v.event()
		switch {
		case errors.Is(err, io.EOF):
			return errEnded
		case err != nil && !malformed(err):
			return err
		}
		change, ok, err := f.change(e)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		select {
		case changes <- change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// change is what e says, if it says anything. An ERROR is the end of a watch,
// inside of an answer that began well.
func (f *follower) change(e event) (c change, ok bool, err error) {
	switch e.Type {
	case "BOOKMARK":
		return change{bookmark: true}, true, nil
	case "ERROR":
		var status metav1.Status
		if err := json.Unmarshal(e.Object, &status); err != nil {
			return c, false, err
		}
		return c, false, statusError(status, 0)
	case "ADDED", "MODIFIED", "DELETED":
	default:
		f.log.Debug("left out an event of a watch", "type", clean(e.Type))
		return c, false, nil
	}
	var o object
	if err := json.Unmarshal(e.Object, &o); err != nil {
		f.log.Debug("left out a Service that is none", "error", clean(err.Error()))
		return c, false, nil
	}
	service := f.service(&o)
	if service == nil {
		return c, false, nil
	}
	c.key = name{service.Namespace, service.Name}
	if e.Type != "DELETED" {
		c.service = service
	}
	return c, true, nil
}
