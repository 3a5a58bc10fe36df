#!/usr/bin/env python3
"""Prints how long each test program and each test takes: tools/test_times.py [WORDS FOR cargo test ...]

Runs the programs one after the other, each with RUST_TEST_THREADS threads, like `cargo test`. The table is Markdown; the
docs have one of a quiet machine (docs/testing.md). The exit status is 1 if a test fails.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

CARGO = os.environ.get("CARGO", "cargo")
# Programs and tests that take less are not shown.
SHOWN_PROGRAM_S, SHOWN_TEST_S = 5, 10
# A line that libtest prints with --report-time.
ENDED = re.compile(r"test (.*) \.\.\. (ok|FAILED|ignored.*) <([0-9.]+)s>")


def programs(words):
    """The test programs, built: the directory that each runs in, its name, and its path."""
    command = [CARGO, "test", "--no-run", "--message-format=json-render-diagnostics", *words]
    built = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    for line in built.splitlines():
        unit = json.loads(line)
        if unit.get("executable") and unit["profile"]["test"]:
            package = pathlib.Path(unit["manifest_path"]).parent
            kind = "" if "test" in unit["target"]["kind"] else " (unit tests)"
            yield package, f"{package.name} {unit['target']['name']}{kind}", unit["executable"]


def run(package, program):
    """Runs a program. Returns its exit status, its seconds, and those of each test."""
    begin = time.monotonic()
    # Libtest tells times on request only where unstable options are allowed.
    env = os.environ | {"RUSTC_BOOTSTRAP": "1"}
    command = [program, "-Zunstable-options", "--report-time"]
    done = subprocess.run(command, cwd=package, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    printed = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        print(printed, file=sys.stderr)
    tests = [(float(found[3]), found[1]) for found in map(ENDED.fullmatch, printed.splitlines()) if found]
    return done.returncode, time.monotonic() - begin, tests


def table(head, rows):
    print(f"| {head} | s |\n|---|---|")
    for seconds, name in rows:
        print(f"| {name} | {seconds:.0f} |")
    print()


def main():
    ran, tests, failed = [], [], False
    for package, name, program in list(programs(sys.argv[1:])):
        status, seconds, its_tests = run(package, program)
        print(f"{seconds:7.1f} s  {name}", file=sys.stderr, flush=True)
        failed |= status != 0
        ran.append((seconds, name))
        tests += [(its_seconds, f"{name}: {test}") for its_seconds, test in its_tests]
    ran.sort(reverse=True)
    tests.sort(reverse=True)
    print(f"{len(ran)} programs, {len(tests)} tests: {sum(seconds for seconds, _ in ran):.0f} s\n")
    table(f"program ({SHOWN_PROGRAM_S} s and more)", [row for row in ran if row[0] >= SHOWN_PROGRAM_S])
    table(f"test ({SHOWN_TEST_S} s and more)", [row for row in tests if row[0] >= SHOWN_TEST_S])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
