#!/usr/bin/env python3
"""Tells which code the tests reach: tools/coverage.py [PROGRAM ...]

Builds everything with counters in target/coverage, runs the test programs (tools/run_tests.py; PROGRAM runs only some), and makes

  target/coverage/page/index.html   all source files with how often each line was run
  target/coverage/summary.md        lines by crate, and the largest functions of which no line was run

The second is printed, too. Servers that are killed count as well: counters are in files that are mapped. What runs in a sandbox
without the environment of the tests, such as a tenant, does not count.
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys

TARGET = pathlib.Path("target/coverage").absolute()
COUNTS = TARGET / "counts"
FLAGS = "-Cinstrument-coverage -Cllvm-args=-runtime-counter-relocation"
# %m: a file for each program; %c: it is mapped, and written to all the time.
PROFILE = str(COUNTS / "%m%c.profraw")
# How many functions without a test are shown.
SHOWN = 10
CODE_REGION = 0
FUNCTION = re.compile(r"\bfn (\w+)")


def tool(name):
    """A program of the component llvm-tools."""
    root = subprocess.run(["rustc", "--print", "sysroot"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    found = list(pathlib.Path(root).glob(f"lib/rustlib/*/bin/{name}"))
    if not found:
        sys.exit(f"there is no {name}: `rustup component add llvm-tools` installs it")
    return str(found[0])


def build(env):
    """Builds all with counters; returns the programs."""
    command = ["cargo", "test", "--workspace", "--all-targets", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True).stdout
    units = (json.loads(line) for line in built.splitlines() if line.startswith("{"))
    return sorted({unit["executable"] for unit in units if unit.get("executable")})


def export(programs):
    """What llvm-cov knows of the functions of all programs, after it has made the page."""
    merged = TARGET / "all.profdata"
    raw = [str(path) for path in COUNTS.glob("*.profraw") if path.stat().st_size]
    listed = TARGET / "raw.txt"
    listed.write_text("".join(f"{path}\n" for path in raw), encoding="utf-8")
    command = [tool("llvm-profdata"), "merge", "--sparse", "--failure-mode=all", "-o", merged, "-f", listed]
    subprocess.run(command, check=True)
    objects = [programs[0], *(f"--object={program}" for program in programs[1:])]
    common = [f"--instr-profile={merged}", "--ignore-filename-regex=/(registry|rustc|target)/", *objects]
    cov = tool("llvm-cov")
    page = [cov, "show", "--format=html", f"--output-dir={TARGET / 'page'}", *common]
    subprocess.run(page, check=True, stderr=subprocess.DEVNULL)
    command = [cov, "export", *common]
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    return json.loads(out)["data"][0]


class Function:
    """A function of the source, whatever was made of it for different types."""

    def __init__(self):
        # How often each region (its begin and end) was run.
        self.regions = collections.Counter()

    def add(self, regions):
        for begin, _, end, _, count, _, _, kind in regions:
            if kind == CODE_REGION:
                self.regions[begin, end] += count

    def lines(self):
        """All lines, and those that were run."""
        every, ran = set(), set()
        # Outer regions first: what is within them says more of its own lines.
        for (begin, end), count in sorted(self.regions.items(), key=lambda one: (one[0][0], -one[0][1])):
            within = set(range(begin, end + 1))
            every |= within
            ran = ran | within if count else ran - within
        return every, ran


def functions(data, root):
    found = collections.defaultdict(Function)
    for function in data["functions"]:
        path = pathlib.Path(function["filenames"][0])
        own = [region for region in function["regions"] if region[5] == 0]
        if own and path.is_relative_to(root) and "/src/" in str(path):
            found[path.relative_to(root), own[0][0]].add(own)
    return found


def name_of(root, path, line):
    """None: it is a closure."""
    text = (root / path).read_text(encoding="utf-8").splitlines()[line - 1]
    said = FUNCTION.search(text)
    return said[1] if said else None


def summary(found, root):
    lines = ["| crate | lines | reached | % |", "|---|---|---|---|"]
    of_crate = collections.defaultdict(lambda: (set(), set()))
    unreached = []
    for (path, line), function in found.items():
        every, ran = function.lines()
        all_of, ran_of = of_crate[path.parts[1] if path.parts[0] == "crates" else path.parts[0]]
        all_of |= {(path, one) for one in every}
        ran_of |= {(path, one) for one in ran}
        if not ran and name_of(root, path, line):
            unreached.append((len(every), path, line))
    for crate, (every, ran) in sorted(of_crate.items()):
        lines.append(f"| {crate} | {len(every)} | {len(ran & every)} | {100 * len(ran & every) / len(every):.1f} |")
    lines += ["", "| function that no test reaches | lines |", "|---|---|"]
    for size, path, line in sorted(unreached, reverse=True)[:SHOWN]:
        lines.append(f"| `{name_of(root, path, line)}` ({path}:{line}) | {size} |")
    return "\n".join(lines) + "\n"


def main():
    root = pathlib.Path.cwd()
    COUNTS.mkdir(parents=True, exist_ok=True)
    for old in COUNTS.glob("*.profraw"):
        old.unlink()
    # Servers of other users count, too.
    COUNTS.chmod(0o1777)
    env = os.environ | {"CARGO_TARGET_DIR": str(TARGET), "RUSTFLAGS": FLAGS, "RUSTDOCFLAGS": FLAGS}
    # Build scripts and macros would write where they run.
    programs = build(env | {"LLVM_PROFILE_FILE": "/dev/null"})
    tests = subprocess.run(
        [sys.executable, "tools/run_tests.py", *sys.argv[1:]], env=env | {"LLVM_PROFILE_FILE": PROFILE}, check=False
    )
    said = summary(functions(export(programs), root), root)
    (TARGET / "summary.md").write_text(said, encoding="utf-8")
    print(f"\n{said}\n{TARGET / 'page/index.html'} shows each line")
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
