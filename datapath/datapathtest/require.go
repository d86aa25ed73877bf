package datapathtest

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Require skips the test unless ok. what is what is missing, one word such as
// "netns", "tun" or "qemu"; how says how to get it. Where the environment
// variable CULVERT_TEST_REQUIRE (a list separated by commas) names what, the
// test fails instead: a machine that should be able to run it does not get away
// with a skip.
func Require(tb testing.TB, what string, ok bool, how string) {
	tb.Helper()
	if ok {
		return
	}
	required := strings.Split(os.Getenv("CULVERT_TEST_REQUIRE"), ",")
	if slices.Contains(required, what) {
		tb.Fatalf("%s is missing, and CULVERT_TEST_REQUIRE names it: %s", what, how)
	}
	tb.Skipf("%s is missing: %s", what, how)
}
