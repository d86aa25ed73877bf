// Command apiserver is Kubernetes' own API server: the cluster of culvert's
// tests. It is a module of its own, so that the product's has none of this.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	os.Exit(cli.Run(app.NewAPIServerCommand()))
}
