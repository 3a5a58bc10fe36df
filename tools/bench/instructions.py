#!/usr/bin/env python3
"""Counts the instructions of a request on its hot paths, and compares them with those in instructions.tsv.

callgrind (valgrind) counts what two programs execute between the entry and the exit of one function:
crates/exports/examples/export_paths.rs and crates/stack/examples/disk_paths.rs. They do no I/O, and their paths are
warm, so each run of a build counts the same. Another compiler or C library makes other code: instructions.tsv names
those that its numbers belong to.

A change that makes a path shorter or longer has new numbers: run this with --update, and give the reason in the
commit's message.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from experiment import TARGET
from process import Failed, last_line, run

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("instructions.tsv")
PROGRAMS = {"fathom-exports": "export_paths", "fathom-stack": "disk_paths"}
# The function that crates/testing/src/instructions.rs calls once for each path.
COUNTED = "counted_instructions"
# valgrind is some fifty times slower than the machine.
LIMIT = 300  # seconds


@dataclass(frozen=True)
class Counted:
    """A path's instructions, for all its requests together."""

    name: str
    requests: int
    instructions: int

    @property
    def each(self) -> float:
        return self.instructions / self.requests


def totals(dumps: list[str]) -> list[int]:
    """The instructions of each call of the counted function, from callgrind's files."""
    found = []
    for dump in dumps:
        if not re.search(r"^desc: Trigger: --dump-after", dump, re.MULTILINE):
            continue  # of the end of the program
        total = re.search(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE)
        if total is None:
            raise Failed("callgrind has written a file without totals")
        found.append(int(total[1]))
    return found


def paths(printed: str, counts: list[int]) -> list[Counted]:
    """A program prints a line for each path, in the order of the counts."""
    lines = [line.split("\t") for line in printed.splitlines()]
    if len(lines) != len(counts):
        raise Failed(f"the program has {len(lines)} paths, and callgrind has counted {len(counts)}")
    return [Counted(name, int(requests), count) for (name, requests), count in zip(lines, counts)]


def count(program: Path) -> list[Counted]:
    with tempfile.TemporaryDirectory(prefix="fathom-instructions-") as place:
        printed = run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={place}/out", "--collect-atstart=no",
                       f"--toggle-collect={COUNTED}", f"--dump-after={COUNTED}", program], LIMIT)
        files = sorted(Path(place).glob("out.*"), key=lambda file: int(file.suffix[1:]))
        return paths(printed, totals([file.read_text(encoding="utf-8") for file in files]))


def build(target: Path) -> list[Path]:
    cargo, env = os.environ.get("CARGO", "cargo"), dict(os.environ, CARGO_TARGET_DIR=str(target))
    built = []
    for package, example in PROGRAMS.items():
        command = [cargo, "build", "--quiet", "--release", "--package", package, "--example", example]
        done = subprocess.run(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise Failed(f"{example} cannot be built: {last_line(done.stderr)}")
        built.append(target / "release" / "examples" / example)
    return built


def toolchain() -> dict[str, str]:
    """What decides about the code that is counted."""
    rustc = run([os.environ.get("RUSTC", "rustc"), "--version"], 60).split()[1]
    return {"rustc": rustc, "libc": os.confstr("CS_GNU_LIBC_VERSION") or "unknown",
            "valgrind": run(["valgrind", "--version"], 60).strip()}


def written(tools: dict[str, str], counted: list[Counted]) -> str:
    head = [f"# {name}: {version}" for name, version in tools.items()]
    lines = [f"{one.name}\t{one.requests}\t{one.instructions}" for one in counted]
    about = "# Written by `make instructions UPDATE=1`. Columns: path, requests, instructions of all of them."
    return "\n".join([about, *head, *lines]) + "\n"


def read(text: str) -> tuple[dict[str, str], list[Counted]]:
    tools = dict(re.findall(r"^# (\w+): (.+)$", text, re.MULTILINE))
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return tools, [Counted(name, int(requests), int(count)) for name, requests, count in lines]


def differences(expected: list[Counted], counted: list[Counted]) -> list[str]:
    """A line for each path that has another number, is new, or is gone."""
    before, now = ({one.name: one for one in side} for side in (expected, counted))
    found = [f"{name}: not counted any more" for name in before if name not in now]
    for name, one in now.items():
        was = before.get(name)
        if was is None:
            found.append(f"{name}: new, {one.each:.1f} instructions a request")
        elif was != one:
            change = one.each / was.each - 1
            found.append(f"{name}: {was.each:.1f} -> {one.each:.1f} instructions a request ({change:+.1%})")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--update", action="store_true", help="write the numbers to instructions.tsv")
    parser.add_argument("--target", type=Path, default=TARGET, help="where it is built, default: %(default)s")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if shutil.which("valgrind") is None:
        sys.exit("error: valgrind is not installed; `make instructions` installs it")
    tools = toolchain()
    counted = [path for program in build(args.target.absolute()) for path in count(program)]
    for one in counted:
        print(f"{one.each:10.1f}  {one.name}")
    if args.update:
        EXPECTED.write_text(written(tools, counted), encoding="utf-8")
        return 0
    of, expected = read(EXPECTED.read_text(encoding="utf-8"))
    found = differences(expected, counted)
    if not found:
        return 0
    print("\n".join(found), file=sys.stderr)
    others = [f"{name} {version} (here {tools[name]})" for name, version in of.items()
              if tools.get(name) != version]
    if others:
        print(f"error: the numbers in {EXPECTED.name} are those of {', '.join(others)}. Compare with the last commit: "
              "check it out, run `make instructions UPDATE=1`, and then count this one", file=sys.stderr)
        return 2
    print(f"error: {len(found)} paths have other numbers than in {EXPECTED.name}. If that is meant: "
          "make instructions UPDATE=1", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as e:
        sys.exit(f"error: {e}")
