package daemon

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath/datapathtest"
	"github.com/culvertnet/culvert/guest/guesttest"
	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What contrib has for Prometheus and Grafana names only what a real scrape has.

const (
	alertsFile    = "../../../contrib/prometheus/alerts.yaml"
	dashboardFile = "../../../contrib/grafana/culvert.json"
)

// An expression is a query, and the texts that show its labels.
type expression struct {
	where, query string
	texts        []string
}

// alerts returns the expressions of the alert rules.
func alerts(t *testing.T) (all []expression) {
	t.Helper()
	text, err := os.ReadFile(alertsFile)
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Name  string `yaml:"name"`
			Rules []struct {
				Alert       string            `yaml:"alert"`
				Expr        string            `yaml:"expr"`
				For         string            `yaml:"for"`
				Labels      map[string]string `yaml:"labels"`
				Annotations map[string]string `yaml:"annotations"`
			} `yaml:"rules"`
		} `yaml:"groups"`
	}
	require.NoError(t, yaml.UnmarshalWithOptions(text, &file, yaml.Strict()))
	names := make(map[string]bool)
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			assert.Regexp(t, `^Culvert[A-Za-z]+$`, r.Alert)
			assert.False(t, names[r.Alert], "%s is there twice", r.Alert)
			names[r.Alert] = true
			assert.Contains(t, []string{"warning", "critical"}, r.Labels["severity"], r.Alert)
			assert.NotEmpty(t, r.Annotations["summary"], r.Alert)
			assert.NotEmpty(t, r.Annotations["description"], r.Alert)
			if r.For != "" {
				_, err := time.ParseDuration(r.For)
				require.NoError(t, err, r.Alert)
			}
			all = append(all, expression{r.Alert, r.Expr, []string{r.Annotations["summary"], r.Annotations["description"]}})
		}
	}
	return all
}

// panels returns the expressions of the dashboard's panels and variables.
func panels(t *testing.T) (all []expression) {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	require.NoError(t, err)
	type source struct{ UID string }
	var file struct {
		Title, UID string
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
		Panels []struct {
			ID          int
			Title, Type string
			Datasource  source
			GridPos     struct{ X, Y, W, H int }
			Targets     []struct {
				Expr, LegendFormat, RefID string
				Datasource                source
			}
		}
	}
	require.NoError(t, json.Unmarshal(text, &file))
	assert.NotEmpty(t, file.Title)
	assert.NotEmpty(t, file.UID)
	require.Equal(t, "datasource", file.Templating.List[0].Type, "whoever imports it has another source")
	for _, v := range file.Templating.List[1:] {
		all = append(all, expression{where: "variable " + v.Name, query: v.Definition})
	}
	taken := make(map[[2]int]string)
	ids := make(map[int]bool)
	for _, p := range file.Panels {
		assert.False(t, ids[p.ID], "%s has another's id", p.Title)
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				require.Empty(t, taken[at], "%s lies on %s", p.Title, taken[at])
				taken[at] = p.Title
				require.Less(t, at[0], 24, p.Title)
			}
		}
		if p.Type == "row" {
			continue
		}
		assert.NotEmpty(t, p.Targets, p.Title)
		assert.Equal(t, "${datasource}", p.Datasource.UID, p.Title)
		for _, target := range p.Targets {
			assert.Equal(t, "${datasource}", target.Datasource.UID, p.Title)
			all = append(all, expression{"panel " + p.Title, target.Expr, []string{target.LegendFormat}})
		}
	}
	return all
}

var (
	// A selector is a metric with, or without, its labels.
	selector = regexp.MustCompile(`\b((?:culvert|process|go)_[a-z_]+|up)\b(?:\{([^}]*)\})?`)
	// A matcher is one of its labels.
	matcher = regexp.MustCompile(`([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	// grouped are the labels that an operator names.
	grouped = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
	// A template shows a label.
	template = regexp.MustCompile(`\{\{\s*([^}]*?)\s*\}\}`)
)

// theirs are the labels that Prometheus adds.
var theirs = []string{"instance", "job"}

// check says what of an expression the scrape does not have.
func (e expression) check(s shown) (wrong []string) {
	had := slices.Clone(theirs)
	metrics := selector.FindAllStringSubmatch(e.query, -1)
	if len(metrics) == 0 {
		wrong = append(wrong, "names no metric")
	}
	for _, m := range metrics {
		name := m[1]
		if base, ok := strings.CutSuffix(name, "_bucket"); ok {
			name = base
			had = append(had, "le")
		}
		labels, ok := s.labels(name)
		if !ok {
			wrong = append(wrong, "no metric "+name)
			continue
		}
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			values, ok := labels[l[1]]
			if !ok && !slices.Contains(theirs, l[1]) {
				wrong = append(wrong, name+" has no label "+l[1])
				continue
			}
			if slices.Contains(theirs, l[1]) || strings.HasPrefix(l[3], "$") {
				continue
			}
			for v := range strings.SplitSeq(l[3], "|") {
				if !values[v] {
					wrong = append(wrong, fmt.Sprintf("%s has no %s=%q", name, l[1], v))
				}
			}
		}
		for l := range labels {
			had = append(had, l)
		}
	}
	check := func(label string) {
		if label != "" && !slices.Contains(had, label) {
			wrong = append(wrong, "nothing in it has the label "+label)
		}
	}
	for _, g := range grouped.FindAllStringSubmatch(e.query, -1) {
		for l := range strings.SplitSeq(g[1], ",") {
			check(strings.TrimSpace(l))
		}
	}
	for _, text := range e.texts {
		for _, shown := range template.FindAllStringSubmatch(text, -1) {
			label, _, _ := strings.Cut(shown[1], " ")
			if label == "$value" {
				continue
			}
			check(strings.TrimPrefix(label, "$labels."))
		}
	}
	return wrong
}

// labels returns a metric's labels with the values they have.
func (s shown) labels(name string) (map[string]map[string]bool, bool) {
	labels := make(map[string]map[string]bool)
	if name == "up" { // Prometheus' own
		return labels, true
	}
	f := s[name]
	if f == nil {
		return nil, false
	}
	for _, m := range f.Metric {
		for _, l := range m.Label {
			if labels[l.GetName()] == nil {
				labels[l.GetName()] = make(map[string]bool)
			}
			labels[l.GetName()][l.GetValue()] = true
		}
	}
	return labels, true
}

// scrapeOfEverything is a scrape in which every metric has a series.
func scrapeOfEverything(t *testing.T) shown {
	t.Helper()
	b, engine, _ := startFollowing(t)
	b.attach(t, "a")
	engine.Start(guesttest.Published(1, freePort(t), 80))
	// The first is reserved, and the second can never be.
	_, port, _ := strings.Cut(b.metrics, ":")
	_, err := b.client.Publish(t.Context(), api.PublishRequest{Publish: []string{port + ":80", "0:[fd00::1]:80"}})
	require.NoError(t, err)
	var s shown
	require.Eventually(t, func() bool {
		s = b.scrape(t)
		return s.value(t, "engine_reachable", "vm=a") == 1 && s.value(t, "cluster_reachable", "vm=a") == 1 && s.value(t, "names") > 0
	}, patience, 50*time.Millisecond)
	return s
}

func TestContribNamesMetricsThatExist(t *testing.T) {
	s := scrapeOfEverything(t)
	for _, e := range append(alerts(t), panels(t)...) {
		for _, wrong := range e.check(s) {
			t.Errorf("%s: %s\n%s", e.where, wrong, e.query)
		}
	}

	// And a metric that is described but never set is none, nor one that nobody can
	// read of.
	doc, err := os.ReadFile("../../../docs/interface.md")
	require.NoError(t, err)
	n := 0
	for name := range s {
		if strings.HasPrefix(name, "culvert_") {
			n++
			assert.Contains(t, string(doc), "| `"+strings.TrimPrefix(name, "culvert_")+"`")
		}
	}
	assert.Equal(t, len(families)+1, n, "with the histogram")
}

// The check finds what is wrong.
func TestContribCheck(t *testing.T) {
	s := scrapeOfEverything(t)
	for query, wrong := range map[string]string{
		`1`:                                          "names no metric",
		`culvert_nothing`:                            "no metric culvert_nothing",
		`culvert_vm_state{stat="ready"}`:             "culvert_vm_state has no label stat",
		`culvert_vm_state{state=~"ready|dead"}`:      `culvert_vm_state has no state="dead"`,
		`sum by (owner) (culvert_flows)`:             "nothing in it has the label owner",
		`rate(culvert_names_bucket{le="1"}[5m]) > 0`: "culvert_names has no label le",
	} {
		assert.Equal(t, []string{wrong}, expression{query: query}.check(s), query)
	}
	assert.Equal(t, []string{"nothing in it has the label owner"}, expression{query: "culvert_flows", texts: []string{"{{ $labels.owner }} {{vm}}"}}.check(s))
	assert.Empty(t, expression{query: `sum by (vm, instance) (culvert_flows{vm=~"$vm"})`, texts: []string{"{{ $value | humanize }}"}}.check(s))
}

// Prometheus' own tool takes the rules, and what is scraped.
func TestPromtool(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	datapathtest.Require(t, "promtool", err == nil, "apt-get install prometheus")
	file, err := filepath.Abs(alertsFile)
	require.NoError(t, err)
	out, err := exec.Command(promtool, "check", "rules", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	// The panels' queries as rules: the tool checks no dashboards.
	var rules []any
	for i, e := range panels(t) {
		if !strings.HasPrefix(e.where, "variable") {
			query := strings.NewReplacer("$__rate_interval", "1m", "$vm", "a", "$instance", "h").Replace(e.query)
			rules = append(rules, map[string]any{"record": fmt.Sprint("panel", i), "expr": query})
		}
	}
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "panels", "rules": rules}}})
	require.NoError(t, err)
	file = filepath.Join(t.TempDir(), "rules.yaml")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	out, err = exec.Command(promtool, "check", "rules", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), fmt.Sprintf("%d rules found", len(rules)))

	b := start(t, full)
	b.attach(t, "a")
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = strings.NewReader(b.text(t))
	out, err = check.CombinedOutput()
	require.NoError(t, err, "%s", out)
}
