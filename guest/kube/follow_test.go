package kube

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// bubble runs test with a fake API server in time of its own.
func bubble(t *testing.T, test func(t *testing.T, f *fakeAPI)) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeAPI(t)
		defer f.stop() // also when test fails, or the bubble never ends
		test(t, f)
	})
}

func TestFollowTellsOfEachChange(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.put(service("web", 80))
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"web:80"}, w.names())

		f.put(service("dns", 53))
		f.put(service("web", 8080))
		time.Sleep(200 * time.Millisecond)
		require.Equal(t, []string{"dns:53", "web:8080"}, w.names())

		f.delete(service("dns", 53))
		time.Sleep(200 * time.Millisecond)
		require.Equal(t, []string{"web:8080"}, w.names())
		require.Equal(t, 1, f.listed())
	})
}

// FB-115: each form in which a watch says that its version is too old, or ends.
func TestFollowListsAnewAfterEveryEndOfAWatch(t *testing.T) {
	gone := status(410, metav1.StatusReasonExpired, "too old resource version: 1 (100)")
	forms := map[string]func(http.ResponseWriter, *http.Request) bool{
		"410 as status": fail(410, metav1.StatusReasonExpired, gone.Message),
		"410 as ERROR":  answer(mustJSON(map[string]any{"type": "ERROR", "object": gone})),
		"410 as ERROR in a watch that goes on": func(w http.ResponseWriter, r *http.Request) bool {
			_, _ = w.Write([]byte(mustJSON(map[string]any{"type": "ERROR", "object": gone})))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return true
		},
		"500":                   fail(500, metav1.StatusReasonInternalError, "etcd"),
		"cut in an object":      answer(`{"type":"ADDED","object":{"kind":"Service","meta`),
		"ended at once":         answer(""),
		"an ERROR that is none": answer(`{"type":"ERROR","object":7}`),
		"garbage":               answer("<html>"),
		"connection cut": func(http.ResponseWriter, *http.Request) bool {
			panic(http.ErrAbortHandler)
		},
	}
	for name, form := range forms {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, f *fakeAPI) {
				f.watch = form
				f.put(service("web", 80))
				w := f.follow(f.kubeconfig(""))
				time.Sleep(10 * time.Second)
				require.Less(t, f.listed(), 5, "lists in the first ten seconds")
				require.Greater(t, f.listed(), 2)

				// It stays so: the waits grow, and no more than to longestWait.
				time.Sleep(10 * time.Minute)
				n := f.listed()
				require.InDelta(t, 62, n, 4)

				// What is listed in between is told, and each failure with its number.
				var failures, lists int
				w.mu.Lock()
				for _, u := range w.updates {
					if u.Err == nil {
						lists++
						require.Zero(t, u.Failures)
						require.Len(t, u.Services, 1)
						continue
					}
					failures++
					require.Equal(t, failures, u.Failures)
					require.Nil(t, u.Services)
					require.Contains(t, u.Err.Error(), "API server at https://127.0.0.1:6443 ")
					if strings.HasPrefix(name, "410") {
						require.ErrorContains(t, u.Err, "answers 410: too old resource version: 1 (100)")
					}
				}
				w.mu.Unlock()
				require.Equal(t, n, lists)
				require.GreaterOrEqual(t, failures, 15)

				// And it recovers by itself.
				f.set(func() { f.watch = nil })
				time.Sleep(longestWait + 5*time.Second)
				f.put(service("dns", 53))
				time.Sleep(200 * time.Millisecond)
				require.Equal(t, []string{"dns:53", "web:80"}, w.names())
			})
		})
	}
}

// One failure costs little, whatever form it has (FB-115: two seconds).
func TestFollowRecoversSoonFromOneFailure(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Minute)
		require.Equal(t, 1, f.listed())

		// The cluster is restored from a backup: fewer Services at an older version.
		f.put(service("new", 1))
		time.Sleep(200 * time.Millisecond)
		require.Equal(t, []string{"new:1"}, w.names())
		f.set(func() {
			clear(f.services)
			f.services["default/old"], f.history, f.version = service("old", 2), nil, 7
		})
		f.server.CloseClientConnections()
		time.Sleep(2 * time.Second)
		require.Equal(t, []string{"old:2"}, w.names())
		f.put(service("web", 80))
		time.Sleep(200 * time.Millisecond)
		require.Equal(t, []string{"old:2", "web:80"}, w.names())
	})
}

// A watch that is cut again and again misses nothing, and its failures are not
// one row when it has told of something in between.
func TestFollowThroughFiftyCuts(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Second)
		for i := range 50 {
			port := int32(1000 + i)
			f.put(service("web", port))
			time.Sleep(150 * time.Millisecond)
			require.Equal(t, []string{fmt.Sprintf("web:%d", port)}, w.names())
			f.server.CloseClientConnections()
			f.put(service("web", 2000+port)) // while nobody watches
			time.Sleep(2 * time.Second)
			require.Equal(t, []string{fmt.Sprintf("web:%d", 2000+port)}, w.names())
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, u := range w.updates {
			require.LessOrEqual(t, u.Failures, 1)
		}
	})
}

// C-39: where watching is refused the list is asked for every two seconds. That
// is no failure, and what has not changed is not told again.
func TestFollowPollsWhereWatchingIsRefused(t *testing.T) {
	for _, code := range []int{403, 405} {
		bubble(t, func(t *testing.T, f *fakeAPI) {
			f.watch = fail(code, metav1.StatusReasonForbidden, `services is forbidden: User "u" cannot watch`)
			f.put(service("web", 80))
			w := f.follow(f.kubeconfig(""))
			time.Sleep(19 * time.Second)
			require.Equal(t, 10, f.listed())
			n, _ := w.told()
			require.Equal(t, 1, n)

			f.put(service("web", 8080))
			time.Sleep(2 * time.Second)
			require.Equal(t, []string{"web:8080"}, w.names())

			// A list that fails does, and polling goes on after it.
			f.set(func() { f.list = fail(500, metav1.StatusReasonInternalError, "etcd") })
			time.Sleep(2 * time.Second)
			_, u := w.told()
			require.ErrorContains(t, u.Err, "answers 500: etcd")
			require.Equal(t, 1, u.Failures)
			f.set(func() { f.list = nil })
			time.Sleep(2 * time.Second)
			require.Equal(t, []string{"web:8080"}, w.names())

			// Watching is tried again when it is time to list anew.
			f.set(func() { f.watch = nil })
			time.Sleep(10 * time.Minute)
			f.put(service("web", 9090))
			time.Sleep(200 * time.Millisecond)
			require.Equal(t, []string{"web:9090"}, w.names())
		})
	}
}

// C-39: a watch that has gone deaf costs ten minutes.
func TestFollowListsAnewEveryTenMinutes(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.watch = func(w http.ResponseWriter, r *http.Request) bool {
			_, _ = w.Write([]byte(`{"type":"BOOKMARK","object":{"kind":"Service","metadata":{"resourceVersion":"100"}}}`))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return true
		}
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Second)
		f.put(service("web", 80))
		time.Sleep(10*time.Minute - 2*time.Second)
		require.Empty(t, w.names())
		time.Sleep(2 * time.Second)
		require.Equal(t, []string{"web:80"}, w.names())
		require.Equal(t, 2, f.listed())
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, u := range w.updates {
			require.NoError(t, u.Err)
		}
	})
}

// The server ends a watch when its time is over: that is no failure.
func TestFollowAWatchThatEndsInGoodOrder(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.watch = func(w http.ResponseWriter, r *http.Request) bool {
			w.(http.Flusher).Flush()
			time.Sleep(5 * time.Minute)
			return true
		}
		w := f.follow(f.kubeconfig(""))
		time.Sleep(16 * time.Minute)
		require.Equal(t, 4, f.listed())
		n, u := w.told()
		require.Equal(t, 4, n)
		require.NoError(t, u.Err)
		w.stop(t)
		time.Sleep(5 * time.Minute) // the handler's
	})
}

func TestFollowTellsABurstInFewUpdates(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Second)
		before, first := w.told()
		for i := range 1000 {
			f.put(service(fmt.Sprintf("s%d", i), 80))
			time.Sleep(500 * time.Microsecond)
		}
		time.Sleep(200 * time.Millisecond)
		after, last := w.told()
		require.LessOrEqual(t, after-before, 8)
		require.Empty(t, first.Services, "a slice of its own")
		require.Len(t, last.Services, 1000)
	})
}

// C-44: every failure is told with its number, and nothing else happens.
func TestFollowCountsFailures(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.put(service("web", 80))
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Minute)
		f.set(func() { f.dialErr = &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED} })
		f.server.CloseClientConnections()
		time.Sleep(7 * time.Minute)
		n, u := w.told()
		require.GreaterOrEqual(t, u.Failures, 15)
		require.EqualError(t, u.Err, "API server at https://127.0.0.1:6443 refused the connection")
		require.ErrorIs(t, u.Err, syscall.ECONNREFUSED)
		require.Equal(t, u.Failures+1, n, "the first list, and each failure")

		f.set(func() { f.dialErr = nil })
		time.Sleep(longestWait + 5*time.Second)
		require.Equal(t, []string{"web:80"}, w.names())
	})
}

// A server that takes its time is given up, and Follow ends at once whatever it
// waits for.
func TestFollowSlowAnswers(t *testing.T) {
	for name, list := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"no answer": func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true },
		"no end": func(w http.ResponseWriter, r *http.Request) bool {
			for r.Context().Err() == nil {
				_, _ = w.Write([]byte(" "))
				w.(http.Flusher).Flush()
				select {
				case <-time.After(time.Second):
				case <-r.Context().Done():
				}
			}
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, f *fakeAPI) {
				f.list = list
				w := f.follow(f.kubeconfig(""))
				time.Sleep(listTimeout + time.Second)
				n, u := w.told()
				require.NotZero(t, n)
				require.EqualError(t, u.Err, "API server at https://127.0.0.1:6443 did not answer in time")
				begin := time.Now()
				w.stop(t)
				require.Zero(t, time.Since(begin))
			})
		})
	}
}

// What a lying server sends is bounded, and costs it its own Services only.
func TestFollowBadLists(t *testing.T) {
	many := func(n int) string {
		var b strings.Builder
		b.WriteString(`{"kind":"ServiceList","metadata":{},"items":[`)
		for i := range n {
			fmt.Fprintf(&b, `%s{"metadata":{"namespace":"d","name":"s%d"}}`, map[bool]string{true: ","}[i > 0], i)
		}
		return b.String() + "]}"
	}
	for text, want := range map[string]string{
		`{}`:                                    `a "" where a ServiceList should be`,
		`[]`:                                    `[ where { should be`,
		`{"kind":"PodList","items":[]}`:         `a "PodList" where`,
		`{"kind":"ServiceList","items":[`:       `cut the connection`,
		`{"kind":"ServiceList","items":{}}`:     `{ where a list should be`,
		`{"kind":"ServiceList","items":[nope]}`: `invalid character`,
		`{"kind":"ServiceList","items":["` + strings.Repeat("x", 4*maxValue) + `"]}`: `a value of more than 8 MiB`,
		`{"kind":"ServiceList","metadata":{"continue":"again"},"items":[]}`:          `a list of more than 1000 pages`,
		`{"kind":"ServiceList","` + strings.Repeat("x", 4*maxValue):                  `a value of more than 8 MiB`,
		many(maxServices + 1): `more than 20000 Services`,
		"<html>\x1b[31m":      `invalid character '<'`,
		`{"kind":"ServiceList","metadata":{"continue":"` + strings.Repeat("x", 9000) + `"}}`: `a continue token of 9000 bytes`,
	} {
		bubble(t, func(t *testing.T, f *fakeAPI) {
			f.list = answer(text)
			w := f.follow(f.kubeconfig(""))
			time.Sleep(500 * time.Millisecond)
			_, u := w.told()
			require.ErrorContains(t, u.Err, want, "%.60s", text)
		})
	}
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.list = answer(many(maxServices))
		w := f.follow(f.kubeconfig(""))
		time.Sleep(500 * time.Millisecond)
		_, u := w.told()
		require.NoError(t, u.Err)
		require.Len(t, u.Services, maxServices)
	})
}

// Values of the wrong type cost the Service that has them, not the others.
func TestFollowLeavesOutWhatIsNoService(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.list = answer(`{"items":[7,null,{"metadata":"x"},{"metadata":{"namespace":"d","name":"a"},"spec":{"type":"LoadBalancer","ports":7}},
			{"metadata":{"namespace":"d","name":"B"}},{"metadata":{"namespace":"d","name":"b","extra":[[]]},"spec":{"type":"LoadBalancer","ports":[{"port":1e99}]}},
			{"metadata":{"namespace":"d","name":"good"},"spec":{"type":"LoadBalancer","ports":[{"port":80},{"port":0},{"port":65536},{"port":-1}]}}],
			"metadata":{"resourceVersion":"5"},"new":{"deep":[1,2]},"kind":"ServiceList"}`)
		f.watch = func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Query().Get("resourceVersion") != "5" {
				panic(http.ErrAbortHandler)
			}
			_, _ = w.Write([]byte(`{"type":"SOMETHING","object":{}}{"type":7}{"type":"ADDED"}{"type":"ADDED","object":[]}
				{"type":"ADDED","object":{"metadata":{"namespace":"../..","name":"x"}}}
				{"type":"ADDED","object":{"metadata":{"namespace":"d","name":"late"},"spec":{"type":"LoadBalancer","ports":[{"port":53,"protocol":"UDP"}]}}}`))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return true
		}
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Second)
		require.Equal(t, []string{"good:80", "late:53"}, w.names())
	})
}

// A watch cannot make the set grow beyond what a list may have.
func TestFollowBoundsAWatch(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		f.watch = func(w http.ResponseWriter, r *http.Request) bool {
			for i := range maxServices + 1 {
				if _, err := fmt.Fprintf(w, `{"type":"ADDED","object":{"metadata":{"namespace":"d","name":"s%d"}}}`, i); err != nil {
					break
				}
			}
			return true
		}
		w := f.follow(f.kubeconfig(""))
		time.Sleep(800 * time.Millisecond)
		w.mu.Lock()
		last := w.updates[len(w.updates)-1]
		w.mu.Unlock()
		require.ErrorContains(t, last.Err, "more than 20000 Services")
	})
}

// A peer that has gone without a word, as a VM that was killed, is found.
func TestFollowFindsADeadPeer(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Minute)
		f.put(service("web", 80))
		time.Sleep(time.Second)
		require.Equal(t, []string{"web:80"}, w.names())
		f.set(func() { f.dead() })
		f.put(service("web", 8080))
		time.Sleep(40 * time.Second)
		require.Equal(t, []string{"web:8080"}, w.names())
	})
}

func TestFollowReadsPages(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		for i := range 2000 {
			f.put(service(fmt.Sprintf("s%d", i), 80))
		}
		f.history = nil
		w := f.follow(f.kubeconfig(""))
		time.Sleep(time.Second)
		_, u := w.told()
		require.Len(t, u.Services, 2000)
	})
}

// Clusters renew their credentials: the file is read again when it changes and
// when the server does not accept what it has said.
func TestFollowReadsTheKubeconfigAgain(t *testing.T) {
	bubble(t, func(t *testing.T, f *fakeAPI) {
		token := "old"
		f.list = func(w http.ResponseWriter, r *http.Request) bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return r.Header.Get("Authorization") != "Bearer "+token && fail(401, metav1.StatusReasonUnauthorized, "Unauthorized")(w, r)
		}
		f.watch = f.list
		path := f.kubeconfig(`{"token": "old"}`)
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})
		w := f.follow(path)
		time.Sleep(time.Second)
		_, u := w.told()
		require.NoError(t, u.Err)

		f.set(func() { token = "new" })
		f.server.CloseClientConnections()
		time.Sleep(5 * time.Second)
		_, u = w.told()
		require.EqualError(t, u.Err, "API server at https://127.0.0.1:6443 does not accept the credentials in "+path)
		require.NoError(t, os.Remove(path))
		time.Sleep(10 * time.Second)
		_, u = w.told()
		require.EqualError(t, u.Err, "kubeconfig "+path+": no such file or directory")
		writeKubeconfig(t, path, "https://127.0.0.1:6443", ca, `{"token": "new"}`)
		time.Sleep(longestWait)
		_, u = w.told()
		require.NoError(t, u.Err)

		// While a watch lasts the file is looked at; a new server is gone to.
		writeKubeconfig(t, path, "https://127.0.0.1:6443/", ca, `{"token": "newest"}`)
		f.set(func() { token = "newest" })
		n := f.listed()
		time.Sleep(lookAtFile + time.Second)
		require.Equal(t, n+1, f.listed())
		_, u = w.told()
		require.NoError(t, u.Err)
	})
}

func mustJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}
