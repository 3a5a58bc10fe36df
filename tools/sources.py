#!/usr/bin/env python3
"""Runs the commands of docs/sources.md and fills in its figures.

Each `fathom lab run ... --output NAME` of the page is run in DIR, one after the other; what is there
already is not run again. Then every figure of the page that says where it is from has its value
written behind that: `<!--NAME MEASURE AXIS=VALUE *FACTOR-->`, or with a path into the JSON of
`fathom report` in the place of the measure, `wiki/cumulative/Guest_benchmark/1`. Figures of a run
that is not in DIR stay as they are.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sources.md"
COMMAND = re.compile(r"^ {4}(fathom lab run .*--output (\S+))$", re.MULTILINE)
# What is written behind it: a number, or a limiter's text, which ends with its cell.
FIGURE = re.compile(r"<!--([^>]+ verdict [^>]+)-->[^|]*?(?= \|)"
                    r"|<!--([^>]+)-->(?:–|[\d,.e-]*\d)?")
NONE = "–"


def measure(fathom: str, directory: Path, text: str, names: list[str]) -> None:
    """Those of these names, or all. An interrupted run goes on where it was."""
    directory.mkdir(parents=True, exist_ok=True)
    for command, name in COMMAND.findall(text):
        if names and name not in names:
            continue
        _, *args = shlex.split(command)
        if (directory / name).is_dir():
            report = load(fathom, directory / name)
            if len(report["cells"]) >= report["planned"]:
                continue
            args = ["lab", "run", "--continue", name]
        print(f"sources: {command}", file=sys.stderr, flush=True)
        subprocess.run([fathom, *args], cwd=directory, check=True, stdout=subprocess.DEVNULL)


@cache
def load(fathom: str, run: Path) -> dict:
    said = subprocess.run([fathom, "report", run, "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(said.stdout)


def value(report: dict, what: str, settings: dict[str, str]) -> float | str | None:
    """Of the one point that has these settings, or at a path."""
    if "/" in what:
        return at(report, what.split("/"))
    points = [point for point in report["points"]
              if settings.items() <= (report["parameters"] | point["settings"]).items()]
    if len(points) != 1:
        return None
    if what == "verdict":
        return points[0]["verdict"]
    return points[0]["measures"].get(what, {}).get("median")


def at(where, path: list[str]):
    """Elements of lists are named by their number, or by the first text that is in them."""
    for step in path:
        if isinstance(where, dict):
            if where.get("count") == 0:
                return None
            where = where.get(step)
        elif isinstance(where, list) and not step.isdigit():
            where = next((one for one in where if step in spoken(one)), None)
        elif isinstance(where, list) and int(step) < len(where):
            where = where[int(step)]
        else:
            return None
    return where


def spoken(one) -> list[str]:
    own = one if isinstance(one, list) else [*one.values(), *one.get("thread", {}).values()]
    return [re.sub("[ /]", "_", text) for text in own if isinstance(text, str)]


def shown(what: float | str | None) -> str:
    """Three digits, or a whole number; texts of limiters up to their evidence."""
    if what is None:
        return NONE
    if isinstance(what, str):
        return what.replace("|", "/").replace(",", ";").split(";")[0]
    if what == int(what):
        return f"{int(what):,}"
    digits = max(0, 2 - len(str(int(abs(what))))) + (1 if abs(what) < 100 else 0)
    return f"{what:,.{digits}f}" if abs(what) >= 0.1 else f"{what:.2g}"


def filled(fathom: str, directory: Path, text: str) -> str:
    def one(figure: re.Match) -> str:
        source = figure[1] or figure[2]
        name, what, *rest = source.split()
        settings = dict(part.split("=", 1) for part in rest if "=" in part)
        factor = next((float(part[1:]) for part in rest if part.startswith("*")), 1)
        run = directory / name
        if not run.is_dir():  # what was measured before, by another, stays
            return figure[0]
        found = value(load(fathom, run), what, settings)
        found = found * factor if isinstance(found, (int, float)) else found
        return f"<!--{source}-->{shown(found)}"

    return FIGURE.sub(one, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the runs are kept")
    parser.add_argument("names", metavar="NAME", nargs="*",
                        help="run these alone, default: all that are not there yet")
    parser.add_argument("--fathom", default=str(ROOT / "target" / "release" / "fathom"),
                        help="the program, default: %(default)s")
    parser.add_argument("--fill", action="store_true", help="run nothing")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    if not args.fill:
        measure(args.fathom, args.directory, text, args.names)
    PAGE.write_text(filled(args.fathom, args.directory, text), encoding="utf-8")


if __name__ == "__main__":
    main()
