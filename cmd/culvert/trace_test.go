package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/culvertnet/culvert/cmd/internal/api"
	"github.com/culvertnet/culvert/datapath/trace"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Trace implements api.Backend: a trace of three frames that never changes, but
// for who names a VM.
func (fakeBackend) Trace(r api.TraceRequest) (api.Trace, error) {
	if r.VM != "" {
		return nil, &api.Problem{Status: http.StatusNotFound, Detail: fmt.Sprintf("there is no VM named %q", r.VM)}
	}
	return fakeTrace{}, nil
}

type fakeTrace struct{}

func (fakeTrace) Stream(_ context.Context, w io.Writer, _ func() error) error {
	b, err := os.ReadFile("../../datapath/trace/testdata/small.pcapng")
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

func (fakeTrace) Close() {}

// TestTraceGolden is what people see of a stream, whose daemon then ends.
func TestTraceGolden(t *testing.T) {
	out, errs, code := cli(t, "--api", serveFake(t), "trace")
	assert.Equal(t, 1, code)
	assert.Equal(t, "2 frames, 1 lost\nculvert: the daemon has ended\n", errs)
	golden(t, "trace", regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d`).ReplaceAllString(out, "hh:mm:ss")) // of here
}

func TestTraceExitCodes(t *testing.T) {
	socket := serveFake(t)
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"trace", "--api", "/nonexistent/api.sock"}, 3, "no daemon"},
		{[]string{"trace", "--last", "--api", "/nonexistent/api.sock"}, 3, "there is no flight recorder"},
		{[]string{"trace", "--last", "--vm", "vm1", "--api", socket}, 3, "there is no flight recorder of VM vm1"},
		{[]string{"trace", "--vm", "other", "--api", socket}, 1, `there is no VM named "other"`},
		{[]string{"trace", "-f", "tcp port http", "--api", socket}, 2, `filter: "http" is no port's number`},
		{[]string{"trace", "-c", "-1", "--api", socket}, 2, "-c -1"},
		{[]string{"trace", "-C", "1", "--api", socket}, 2, "need a file"},
		{[]string{"trace", "-C", "1", "-w", "-", "--api", socket}, 2, "need a file"},
		{[]string{"trace", "-w", "/nonexistent/file", "--api", socket}, 1, "/nonexistent/file"},
		{[]string{"trace", "-c", "1", "--api", socket}, 0, "1 frames, 0 lost"},
	} {
		_, errs, code := cli(t, c.args...)
		assert.Equal(t, c.code, code, "%v: %s", c.args, errs)
		assert.Contains(t, errs, c.want)
		if code != 0 {
			assert.Equal(t, 1, strings.Count(errs, "culvert: "), "one sentence: %s", errs)
		}
	}
}

// TestTraceRotates: each file is whole, and together they hold each frame once.
func TestTraceRotates(t *testing.T) {
	dir := t.TempDir()
	var in bytes.Buffer
	b, err := os.ReadFile("../../datapath/trace/testdata/small.pcapng")
	require.NoError(t, err)
	r := trace.NewBlockReader(bytes.NewReader(b))
	var packet []byte
	for {
		block, err := r.Next()
		if err != nil {
			break
		}
		if block.Kind == trace.BlockPacket && packet == nil {
			packet = bytes.Clone(block.Raw)
		}
		if block.Kind == trace.BlockSection || block.Kind == trace.BlockInterface {
			in.Write(block.Raw)
		}
	}
	const frames = 30000
	for range frames {
		in.Write(packet)
	}
	files := &traceFiles{path: filepath.Join(dir, "x.pcapng"), size: 1e6}
	tr := &traced{options: &traceOptions{}, out: files, in: trace.NewBlockReader(&in)}
	require.ErrorIs(t, tr.copy(), io.EOF)
	require.NoError(t, files.end(tr))
	assert.Equal(t, frames, tr.frames)
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, names, (frames*len(packet)+999_999)/1_000_000)
	total, received := 0, uint64(0)
	for _, name := range names {
		assert.Regexp(t, `^x(-\d+)?\.pcapng$`, name.Name())
		file, err := os.Open(filepath.Join(dir, name.Name()))
		require.NoError(t, err)
		info, err := file.Stat()
		require.NoError(t, err)
		assert.LessOrEqual(t, info.Size(), int64(1_000_100))
		one := trace.NewBlockReader(file)
		for {
			block, err := one.Next()
			if err == io.EOF {
				break
			}
			require.NoError(t, err)
			switch block.Kind {
			case trace.BlockPacket:
				total++
			case trace.BlockStatistics:
				_, n, _, err := block.Statistics()
				require.NoError(t, err)
				received += n
			}
		}
		require.NoError(t, file.Close())
	}
	assert.Equal(t, frames, total)
	assert.EqualValues(t, frames, received)
}
