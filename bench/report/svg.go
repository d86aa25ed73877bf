package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// A chart is horizontal bars in groups, each with a whisker from its sample's
// least to its greatest. It has a background of its own, so that a dark page does
// not swallow its text.
type chart struct {
	title, source string
	series        []string
	groups        []group
}

// A group has a bar for each series; one without a sample is left out.
type group struct {
	name string
	bars []sample
}

// Lengths in SVG's user units, pixels at the picture's own size. Text is 13 high
// and at most 8 wide a character in the fonts that stand behind sans-serif.
const (
	chartWidth = 760
	barHeight  = 14
	groupGap   = 12
	charWidth  = 8
	plotTop    = 74 // below title, source and legend
	valueSpace = 56 // for a figure right of the longest bar
	axisSpace  = 34 // for the figures below the axis
	margin     = 16
)

// seriesColors differ for the colour-blind too (Okabe and Ito's palette) and stand
// out from white.
var seriesColors = []string{"#0072b2", "#e69f00"}

// A scale leads from a figure to its place.
type scale struct {
	left, width float64 // of the axis
	max, step   float64 // of the figures
}

func (s scale) x(v float64) float64 { return s.left + s.width*v/s.max }

// scale has the axis begin at 0, for bars to be in proportion, and end where the
// longest whisker does, or else, for one bad round not to flatten the rest, half a
// bar behind the longest bar.
func (c chart) scale() scale {
	longest, greatest, median := 0, 0.0, 0.0
	for _, g := range c.groups {
		longest = max(longest, utf8.RuneCountInString(g.name))
		for _, bar := range g.bars {
			if bar != nil {
				greatest, median = max(greatest, slices.Max(bar)), max(median, bar.median())
			}
		}
	}
	left := float64(margin + longest*charWidth + 8)
	end := min(greatest, 1.5*median)
	if end == 0 {
		end = 1
	}
	return scale{left: left, width: chartWidth - left - valueSpace - margin, max: end, step: tick(end / 8)}
}

// tick returns the least of 1, 2 and 5 times a power of ten that is not below v.
func tick(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= v {
			return m * power
		}
	}
	return 10 * power
}

// svg draws the chart. The same chart is the same bytes.
func (c chart) svg() []byte {
	s := c.scale()
	groupHeight := len(c.series)*barHeight + groupGap
	bottom := plotTop + len(c.groups)*groupHeight
	height := bottom + axisSpace
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img" aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="13" fill="#1a1a1a">`+"\n", chartWidth, height)
	fmt.Fprintf(&b, "<title id=\"title\">%s</title>\n<desc id=\"desc\">%s</desc>\n", escape(c.title), escape(c.description()))
	fmt.Fprintf(&b, `<rect width="%d" height="%d" rx="6" fill="#fff"/>`+"\n", chartWidth, height)
	text(&b, margin, 26, `font-size="16" font-weight="bold"`, c.title)
	text(&b, chartWidth-margin, 56, `text-anchor="end" font-size="11" fill="#555"`, c.source)
	x := margin
	for i, name := range c.series {
		fmt.Fprintf(&b, `<rect x="%d" y="46" width="12" height="12" fill="%s"/>`+"\n", x, seriesColors[i])
		text(&b, float64(x+18), 57, "", name)
		x += 18 + utf8.RuneCountInString(name)*charWidth + 16
	}
	for n := range int(s.max/s.step) + 1 {
		v := float64(n) * s.step
		fmt.Fprintf(&b, `<path d="M%.1f %dV%d" stroke="#ddd"/>`+"\n", s.x(v), plotTop, bottom)
		text(&b, s.x(v), float64(bottom+18), `text-anchor="middle" font-size="11" fill="#555"`, number(v))
	}
	for i, g := range c.groups {
		g.draw(&b, s, float64(plotTop+i*groupHeight+groupGap/2))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// draw draws the group's bars from y downwards.
func (g group) draw(b *bytes.Buffer, s scale, y float64) {
	style := `text-anchor="end"`
	if isOurs(g.name) {
		style += ` font-weight="bold"`
	}
	text(b, s.left-8, y+float64(len(g.bars))*barHeight/2+4.5, style, g.name)
	for i, bar := range g.bars {
		if bar == nil {
			continue
		}
		top := y + float64(i)*barHeight
		from, to := s.x(slices.Min(bar)), s.x(min(slices.Max(bar), s.max))
		fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%d" fill="%s"/>`+"\n", s.left, top+1, s.x(bar.median())-s.left, barHeight-2, seriesColors[i])
		end := "m0 -3v6" // ├──┤
		if slices.Max(bar) > s.max {
			end = "" // ├──
		}
		fmt.Fprintf(b, `<path d="M%.1f %.1fv6m0 -3H%.1f%s" stroke="#1a1a1a" fill="none"/>`+"\n", from, top+4, to, end)
		text(b, to+5, top+11, `font-size="11"`, number(bar.median()))
	}
}

// description says in words what the bars show, for those who do not see them.
func (c chart) description() string {
	var lines []string
	for _, g := range c.groups {
		var bars []string
		for i, bar := range g.bars {
			if bar != nil {
				bars = append(bars, c.series[i]+" "+bar.String())
			}
		}
		lines = append(lines, g.name+": "+strings.Join(bars, ", "))
	}
	return c.source + ". " + strings.Join(lines, "; ") + "."
}

func text(b *bytes.Buffer, x, y float64, style, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" %s>%s</text>`+"\n", x, y, style, escape(s))
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes everything
	return b.String()
}
