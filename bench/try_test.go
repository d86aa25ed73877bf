package bench

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestTry(t *testing.T) {
	stumble := errors.New("no answer\nin time")
	for name, c := range map[string]struct {
		peer  bool
		fails int // before it passes
		begun int
		want  error
	}{
		"ours passes":         {false, 0, 1, nil},
		"ours fails at once":  {false, 1, 1, stumble},
		"a peer passes":       {true, 0, 1, nil},
		"a peer stumbles":     {true, tries - 1, tries, nil},
		"a peer cannot do it": {true, tries, tries, stumble},
	} {
		begun := 0
		b := &bed{peer: c.peer}
		err := b.try(t, func() error {
			if begun++; begun <= c.fails {
				return stumble
			}
			return nil
		})
		assert.Equal(t, c.want, err, name)
		assert.Equal(t, c.begun, begun, name)
	}
}
