package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// addOutput gives cmd the flag that every listing command has.
func addOutput(cmd *cobra.Command) {
	cmd.Flags().StringP("output", "o", "table", "`FORMAT`: table for people, json for programs")
}

// asJSON reports whether cmd is to print JSON.
func asJSON(cmd *cobra.Command) (bool, error) {
	switch format, _ := cmd.Flags().GetString("output"); format {
	case "table":
		return false, nil
	case "json":
		return true, nil
	default:
		return false, &usageError{fmt.Errorf("output format %q is neither table nor json", format)}
	}
}

// print writes list as JSON, or as the table that t makes of it.
func printList[T any](cmd *cobra.Command, list []T, t func([]T) *table) error {
	jsonWanted, err := asJSON(cmd)
	if err != nil {
		return err
	}
	if jsonWanted {
		return writeJSON(cmd.OutOrStdout(), list)
	}
	return t(list).write(cmd.OutOrStdout())
}

func writeJSON[T any](w io.Writer, list []T) error {
	if list == nil {
		list = []T{}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(list)
}

// A table is a listing for people: aligned columns, one line a row.
type table struct {
	head  []string
	rows  [][]string
	state int // the column that is coloured by its word; -1 for none
	// widths are the columns' least widths, and their widths once written: a
	// table that goes on, headless, fits the one before it.
	widths   []int
	headless bool
}

// gap stands between columns.
const gap = "   "

// write writes the table as fits w: a terminal, with colours unless NO_COLOR is
// set, or anything else.
func (t *table) write(w io.Writer) error {
	width, terminal := terminalWidth(w)
	if !terminal {
		width = 0
	}
	_, err := io.WriteString(w, t.text(width, terminal && os.Getenv("NO_COLOR") == ""))
	return err
}

// text returns the table's lines. One longer than width ends in "…"; width 0 is
// for no limit. With colour the state has its own.
func (t *table) text(width int, colour bool) string {
	widths := make([]int, len(t.head))
	copy(widths, t.widths)
	rows := append([][]string{t.head}, t.rows...)
	for _, row := range rows {
		for i := range row {
			row[i] = printable(row[i])
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	t.widths = widths
	var out strings.Builder
	for n, row := range rows {
		if n == 0 && t.headless {
			continue
		}
		var line strings.Builder
		start, end := 0, 0 // of the state, in runes
		at := 0
		for i, cell := range row {
			if i > 0 {
				line.WriteString(gap)
				at += len(gap)
			}
			if i == t.state {
				start, end = at, at+utf8.RuneCountInString(cell)
			}
			line.WriteString(cell)
			at += utf8.RuneCountInString(cell)
			if pad := widths[i] - utf8.RuneCountInString(cell); pad > 0 {
				line.WriteString(strings.Repeat(" ", pad))
				at += pad
			}
		}
		text := []rune(strings.TrimRight(line.String(), " "))
		if width > 0 && len(text) > width {
			text = append(text[:width-1], '…')
		}
		if colour && n > 0 && t.state >= 0 && end <= len(text) {
			fmt.Fprintf(&out, "%s%s%s\x1b[0m%s\n", string(text[:start]), colourOf(row[t.state]), string(text[start:end]), string(text[end:]))
			continue
		}
		out.WriteString(string(text))
		out.WriteByte('\n')
	}
	return out.String()
}

// colourOf returns the escape sequence of a state's colour.
func colourOf(state string) string {
	switch state {
	case "forwarded", "ready", "open", "ok":
		return "\x1b[32m" // green
	case "failed", "gone", "broken":
		return "\x1b[31m" // red
	case "pending", "waiting", "stalled", "paused", "connecting", "unknown":
		return "\x1b[33m" // yellow
	}
	return "\x1b[2m" // dim
}

// printable makes one line of s that moves no cursor: what comes from a guest
// is shown, not obeyed.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		if unicode.IsSpace(r) {
			return ' '
		}
		return '�'
	}, s)
}

// terminalWidth returns the width of the terminal that w is.
func terminalWidth(w io.Writer) (width int, terminal bool) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0, false
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil || width <= 0 {
		return 80, true
	}
	return width, true
}

// bytesText writes a number of bytes for people: "0 B", "1.5 MiB".
func bytesText(n uint64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1024 && unit < 4 {
		v /= 1024
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[unit])
}

// ageText writes a duration for people: "3s", "12m", "5h", "9d".
func ageText(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

// secondsText is ageText of seconds.
func secondsText(s float64) string { return ageText(time.Duration(s * float64(time.Second))) }
