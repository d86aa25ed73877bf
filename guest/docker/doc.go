// Package docker follows the running containers of a Docker engine.
//
// It is a thin layer over the engine's own client: it dials where it is told,
// and turns the engine's answers, which come from the guest and are not
// trusted, into Containers. It decides nothing: package reconcile does.
//
// # Theory of operation
//
// A listing is one request for the running containers, and one more for each
// that is new or that looks different from before: when it was started, and
// which of its ports lead nowhere, only an inspection says. The listing names each
// container's endpoints, which the engine makes anew at every start, so a
// container that looks the same is the same, and a quiet engine is asked once a
// comparison. An inspection that fails for that container alone leaves it as the
// listing shows it; one container on which the engine hangs delays nobody for
// long.
//
// Everything the engine sends passes a gauge on its way in (gauge.go), which
// ends an answer that is longer, or made of more pieces, than any honest one. An
// answer that is refused, cut short or none of the API's is an error of the
// listing, and an error changes nothing (C-31).
//
// Events only say that something happened. The stream is opened with the
// engine's own time of just before, so what happens while it opens is replayed,
// and a listing made after subscribed misses nothing.
package docker
