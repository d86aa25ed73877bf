package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// A reader reads one file and says where its errors are.
type reader struct {
	name string
	text []byte
	file *ast.File
}

func (r *reader) decode(into *fileConfig) error {
	file, err := parser.ParseBytes(r.text, 0)
	if err != nil {
		return r.syntax(err)
	}
	r.file = file
	for _, doc := range file.Docs[min(1, len(file.Docs)):] {
		if doc.Body != nil {
			p := doc.Body.GetToken().Position
			return r.mark(p.Line, p.Column, errors.New("there is a second document; a config is one"))
		}
	}
	before := *into
	err = yaml.NewDecoder(bytes.NewReader(r.text), yaml.Strict()).Decode(into)
	if errors.Is(err, io.EOF) { // there is nothing but comments
		*into = before // the library clears it
		return nil
	}
	return r.syntax(err)
}

// syntax gives the YAML library's errors our form. Nil stays nil.
func (r *reader) syntax(err error) error {
	var y yaml.Error
	if err == nil || !errors.As(err, &y) || y.GetToken() == nil {
		return r.mark(0, 0, err)
	}
	said := errors.New(y.GetMessage())
	var t *yaml.TypeError
	if errors.As(err, &t) {
		said = fmt.Errorf("%s is wanted here, not %s", inYAML(t.DstType), inYAML(t.SrcType))
	}
	var n *yaml.UnexpectedNodeTypeError
	if errors.As(err, &n) {
		said = fmt.Errorf("%s is wanted here, not %s", nodeInYAML(n.Expected), nodeInYAML(n.Actual))
	}
	if strings.Contains(y.GetMessage(), "'\t'") {
		said = errors.New("a tab cannot indent YAML: use spaces")
	}
	p := y.GetToken().Position
	return r.mark(p.Line, p.Column, said)
}

// inYAML names a Go type as the file's author knows it.
func inYAML(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Slice:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "a mapping"
	case reflect.String:
		return "a text"
	}
	return "a number"
}

// nodeInYAML names a kind of node likewise.
func nodeInYAML(t ast.NodeType) string {
	switch t {
	case ast.BoolType:
		return "true or false"
	case ast.SequenceType:
		return "a list"
	case ast.MappingType, ast.MappingValueType:
		return "a mapping"
	case ast.StringType, ast.LiteralType:
		return "a text"
	case ast.NullType:
		return "nothing"
	}
	return "a number"
}

// mark puts the file's name, the place, and the line with a caret to err. Line 0
// is a place unknown. Nil stays nil.
func (r *reader) mark(line, column int, err error) error {
	switch {
	case err == nil:
		return nil
	case line == 0:
		return fmt.Errorf("%s: %w", r.name, err)
	}
	return fmt.Errorf("%s:%d:%d: %w\n%s", r.name, line, column, err, r.point(line, column))
}

// at says that what stands at path (goccy/go-yaml's, "$.vms[0].node") is wrong.
func (r *reader) at(path string, err error) error {
	err = fmt.Errorf("%s: %w", strings.TrimPrefix(path, "$."), err)
	if p, perr := yaml.PathString(path); perr == nil {
		if node, nerr := p.FilterFile(r.file); nerr == nil && node != nil {
			pos := node.GetToken().Position
			return r.mark(pos.Line, pos.Column, err)
		}
	}
	return r.mark(0, 0, err) // a default, or the command line's
}

// has says whether something stands at path.
func (r *reader) has(path string) bool {
	p, err := yaml.PathString(path)
	if err != nil {
		return false
	}
	node, err := p.FilterFile(r.file)
	return err == nil && node != nil
}

// point shows a line of the file with a caret under the column, both from 1.
func (r *reader) point(line, column int) string {
	lines := strings.Split(string(r.text), "\n")
	if line < 1 || line > len(lines) {
		return ""
	}
	text := strings.TrimRight(lines[line-1], "\r")
	pad := []rune(text)[:min(max(column-1, 0), len([]rune(text)))]
	for i, c := range pad {
		if c != '\t' {
			pad[i] = ' '
		}
	}
	return fmt.Sprintf("    %s\n    %s^", text, string(pad))
}
