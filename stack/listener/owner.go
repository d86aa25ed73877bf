package listener

// An Owner is who asked for listeners. It states its whole set each time (C-2).
type Owner struct {
	// Kind is "config", "cli", "docker" or "kubernetes".
	Kind string
	// ID tells owners of one kind apart: the publish's text for config and cli,
	// a container's full ID, namespace/name:port/PROTO of a Service's port.
	ID string
	// VM tells equal IDs of two VMs apart: two clusters may have a Service of one
	// name. It is empty for config and cli, whose IDs are unique. No user sees it:
	// a row names its VM anyway.
	VM string
}

// The kinds of owners, as users see them in `culvert ls`.
const (
	KindConfig     = "config"
	KindCLI        = "cli"
	KindDocker     = "docker"
	KindKubernetes = "kubernetes"
)

// shortID is how much of a container's ID people are shown, as docker does.
const shortID = 12

// String returns "kind id", as in a sentence that names a holder; a container's
// ID is cut short.
func (o Owner) String() string {
	if o.Kind == KindDocker && len(o.ID) > shortID {
		return o.Kind + " " + o.ID[:shortID]
	}
	return o.Kind + " " + o.ID
}
