package main

import (
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A drawing is what the tests look at of an SVG.
type drawing struct {
	Width int    `xml:"width,attr"`
	Role  string `xml:"role,attr"`
	Title string `xml:"title"`
	Desc  string `xml:"desc"`
	Rects []struct {
		X     float64 `xml:"x,attr"`
		Width float64 `xml:"width,attr"`
		Fill  string  `xml:"fill,attr"`
	} `xml:"rect"`
	Paths []struct {
		D string `xml:"d,attr"`
	} `xml:"path"`
	Texts []struct {
		X      float64 `xml:"x,attr"`
		Anchor string  `xml:"text-anchor,attr"`
		Weight string  `xml:"font-weight,attr"`
		Text   string  `xml:",chardata"`
	} `xml:"text"`
}

func mustDraw(t *testing.T, c chart) (d drawing) {
	t.Helper()
	require.NoError(t, xml.Unmarshal(c.svg(), &d))
	return d
}

func TestSVG(t *testing.T) {
	c := chart{title: "a <b> & c", source: "run x", series: []string{"to", "fro"}, groups: []group{
		{"loopback", []sample{{39, 40, 41}, {20}}},
		{"culvert-vhost-user", []sample{nil, {10, 5, 80}}},
	}}
	d := mustDraw(t, c)
	assert.Equal(t, "img", d.Role)
	assert.Equal(t, "a <b> & c", d.Title)
	assert.Equal(t, "run x. loopback: to 40 (39 to 41), fro 20; culvert-vhost-user: fro 10 (5 to 80).", d.Desc)
	assert.Equal(t, "#fff", d.Rects[0].Fill)
	assert.InDelta(t, d.Width, d.Rects[0].Width, 0, "the background is everywhere")

	// Background, legend, then a bar for each sample: the medians 40, 20, 10.
	bars := d.Rects[3:]
	require.Len(t, bars, 3)
	for i, median := range []float64{40, 20, 10} {
		assert.InDelta(t, bars[0].X, bars[i].X, 0)
		assert.InDelta(t, bars[2].Width*median/10, bars[i].Width, 0.5) // rounded to 0.1 each
	}
	for _, text := range d.Texts {
		width := float64(utf8.RuneCountInString(text.Text) * charWidth)
		switch text.Anchor {
		case "end":
			assert.GreaterOrEqual(t, text.X, width, text.Text)
		case "middle":
			assert.Less(t, text.X+width/2, float64(d.Width), text.Text)
		default:
			assert.Less(t, text.X+width, float64(d.Width), text.Text)
		}
	}
	assert.Equal(t, c.svg(), c.svg())
}

// TestOursInPlots has both of culvert's paths stand out alike, with bars of the
// series' color.
func TestOursInPlots(t *testing.T) {
	c := chart{title: "t", series: []string{"p50"}, groups: []group{
		{"loopback", []sample{{20}}}, {"culvert-tap", []sample{{60}}}, {"culvert-tap-promoted", []sample{{50}}},
	}}
	d := mustDraw(t, c)
	var bold []string
	for _, text := range d.Texts {
		if text.Weight == "bold" {
			bold = append(bold, text.Text)
		}
	}
	assert.Equal(t, []string{"t", "culvert-tap", "culvert-tap-promoted"}, bold)
	bars := d.Rects[2:]
	require.Len(t, bars, 3)
	assert.Equal(t, bars[1].Fill, bars[2].Fill)
}

func TestScale(t *testing.T) {
	for _, c := range []struct{ greatest, step float64 }{
		{0.9, 0.2}, {1, 0.2}, {1.1, 0.2}, {11, 2}, {41, 10}, {12000, 2000}, {0, 0.2},
	} {
		s := chart{groups: []group{{"x", []sample{{c.greatest * 0.9, c.greatest}, nil}}}}.scale()
		assert.InEpsilon(t, c.step, s.step, 1e-9, "to %g", c.greatest)
		assert.InDelta(t, s.left, s.x(0), 1e-9)
		if c.greatest > 0 {
			assert.InDelta(t, s.left+s.width, s.x(c.greatest), 1e-9)
		}
	}
}

func TestOutlier(t *testing.T) {
	c := chart{series: []string{"p99"}, groups: []group{{"calm", []sample{{30, 40, 50}}}, {"once bad", []sample{{10, 20, 9000}}}}}
	assert.InDelta(t, 60, c.scale().max, 1e-9, "half of 40 more than 40")
	d := mustDraw(t, c)
	whiskers := d.Paths[len(d.Paths)-2:]
	assert.True(t, strings.HasSuffix(whiskers[0].D, "v6"), whiskers[0].D)
	assert.True(t, strings.HasSuffix(whiskers[1].D, fmt.Sprintf("H%d.0", chartWidth-valueSpace-margin)), "%s goes to the edge and has no end", whiskers[1].D)
}

func TestPlots(t *testing.T) {
	peers := mustRun(t, "peers", "BenchmarkPingPong/path=loopback-2 1 20 p50-µs\nBenchmarkPingPong/path=socat-2 1 66 p50-µs 99 p99-µs\n")
	ours := mustRun(t, "ours", "BenchmarkPingPong/path=culvert-tap-2 1 60 p50-µs\nBenchmarkCopy-2 1 1 ns/op\n")
	later := mustRun(t, "later", "BenchmarkPingPong/path=loopback-2 1 21 p50-µs\nBenchmarkPingPong/path=nft-veth-2 1 22 p50-µs\n")
	dir := t.TempDir()
	for _, c := range []struct {
		runs       []*run
		named, not string
	}{
		{[]*run{ours}, "culvert-tap", "socat"},
		{[]*run{peers, ours}, "socat", "culvert-tap"}, // more paths
		{[]*run{peers, later}, "nft-veth", "socat"},   // as many, and later
	} {
		var out strings.Builder
		require.NoError(t, writePlots(&out, dir, c.runs))
		assert.Equal(t, 1, strings.Count(out.String(), "!["), out.String())
		drawn, err := os.ReadFile(filepath.Join(dir, "latency.svg"))
		require.NoError(t, err)
		assert.Contains(t, string(drawn), c.named)
		assert.NotContains(t, string(drawn), c.not)
	}
	for _, p := range plots {
		assert.LessOrEqual(t, len(p.series), len(seriesColors), p.file)
	}
}
