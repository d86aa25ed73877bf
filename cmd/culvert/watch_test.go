package main

import (
	"testing"
	"time"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/stretchr/testify/assert"
)

// TestRates are taken over a second or so, whatever else causes readings.
func TestRates(t *testing.T) {
	var r rates
	at := time.Now()
	texts := func(after time.Duration, counters map[string]api.Traffic) []string {
		r.read(at.Add(after), counters)
		a, b := r.texts("x")
		return []string{a, b}
	}
	x := func(toGuest, toHost uint64) map[string]api.Traffic {
		return map[string]api.Traffic{"x": {ToGuest: toGuest, ToHost: toHost}}
	}
	none := []string{"-", "-"}
	assert.Equal(t, none, texts(0, x(1<<30, 5)), "of one reading")
	assert.Equal(t, none, texts(time.Millisecond, x(2<<30, 5)), "too soon after it")
	assert.Equal(t, []string{"512.0 MiB/s", "0 B/s"}, texts(2*time.Second, x(2<<30, 5)))
	assert.Equal(t, []string{"512.0 MiB/s", "0 B/s"}, texts(2100*time.Millisecond, x(9<<30, 5)), "the last that was taken")
	assert.Equal(t, none, texts(3*time.Second, x(0, 0)), "another of that name")
	assert.Equal(t, []string{"10 B/s", "20 B/s"}, texts(4*time.Second, x(10, 20)))
	assert.Equal(t, none, texts(5*time.Second, nil), "gone")
	assert.Equal(t, none, texts(6*time.Second, x(10, 20)), "back")
}

func TestAddRates(t *testing.T) {
	for _, table := range []*table{
		listenerTable([]api.Listener{{Detail: "d"}}), flowTable([]api.Flow{{}}), vmTable([]api.VM{{}}),
	} {
		columns := len(table.head)
		addRates(table, func(int) (string, string) { return "1 B/s", "2 B/s" })
		assert.Len(t, table.head, columns+2)
		assert.Len(t, table.rows[0], columns+2)
		for i, name := range table.head {
			switch name {
			case "GUEST/S":
				assert.Equal(t, "TO HOST", table.head[i-1])
				assert.Equal(t, "1 B/s", table.rows[0][i])
			case "HOST/S":
				assert.Equal(t, "2 B/s", table.rows[0][i])
			}
		}
	}
}
