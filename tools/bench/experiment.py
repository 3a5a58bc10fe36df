"""An experiment: its plan, its cells, and the run directory (docs/run-directory.md) that they leave
for `fathom report`."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from process import Failed

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target"))

# Settings of a cell, by parameter.
Settings = dict[str, str]
# What a cell has measured, by name, as cell.json has it.
Measures = dict[str, dict]

# What each figure counts, and which way it should go; names and units are those of `fathom bench`.
FIGURES = {
    "iops": ("per-second", "higher"),
    "throughput": ("megabytes-per-second", "higher"),
    "latency.p50": ("nanoseconds", "lower"),
    "latency.p99": ("nanoseconds", "lower"),
    "cpu.server": ("cpu-microseconds-per-request", "lower"),
    "cpu.load": ("cpu-microseconds-per-request", "lower"),
    # Of a command as a whole.
    "time": ("seconds", "lower"),
    "cpu.time": ("seconds", "lower"),
    # Of the CPUs, what programs took that are not measured.
    "others": ("percent", "neither"),
    # What a filter did beyond what it was asked for.
    "rate.error": ("percent", "neither"),
    "late.p50": ("nanoseconds", "lower"),
    "late.p99": ("nanoseconds", "lower"),
    "late.max": ("nanoseconds", "lower"),
}


def measures(figures: dict[str, float], samples: int = 0) -> Measures:
    return {name: {"name": name, "unit": FIGURES[name][0], "value": value, "samples": samples,
                   "interval": None, "better": FIGURES[name][1]}
            for name, value in figures.items()}


def options(name: str, about: str, rounds: int, seconds: float) -> argparse.ArgumentParser:
    """Those of every experiment; `args.fathom` is the caller's to name."""
    parser = argparse.ArgumentParser(description=about.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=seconds,
                        help="per measurement, default: %(default)s")
    parser.add_argument("--dir", type=Path, default=TARGET,
                        help="where the file on disk is made, default: %(default)s")
    parser.add_argument("--server-cpu", type=int,
                        help="default: the one that takes the disks' interrupts")
    parser.add_argument("--load-cpu", type=int, help="default: the first other one")
    parser.add_argument("--output", type=new_directory, metavar="RUN",
                        default=TARGET / time.strftime(f"{name}-%Y%m%d-%H%M%S.run", time.gmtime()),
                        help="run directory to make, default: %(default)s")
    return parser


def new_directory(text: str) -> Path:
    if os.path.lexists(text):
        raise argparse.ArgumentTypeError(f"{text} is there already: name another")
    return Path(text)


def plan(groups: list[list[Settings]], rounds: int, fixed: Settings) -> list[dict]:
    """Cells in the order in which they are run: what is compared (a group) one after the other, so
    within seconds, and another one first in each round."""
    points = [point for group in groups for point in group]
    digits = len(str(len(points)))
    cells = []
    for turn in range(rounds):
        for group in groups:
            first = turn % len(group)
            cells += [{"id": f"{points.index(point) + 1:0{digits}}-{turn + 1}", "round": turn + 1,
                       "settings": point | fixed} for point in group[first:] + group[:first]]
    return cells


def run(args: argparse.Namespace, made: dict, name: str, about: str, cells: list[dict],
        beside: tuple[str, dict[str, str]], measure: Callable[[Settings], Measures]) -> list[dict]:
    """Runs the cells, each of which is on disk as soon as it has ended, and prints the report.
    `made` is a run.json of this machine; `beside` has the parameter whose values are compared, and
    headings by measures."""
    parameters = {key: list(dict.fromkeys(cell["settings"][key] for cell in cells))
                  for key in cells[0]["settings"]}
    shown = [{"measure": key, "heading": heading} for key, heading in beside[1].items()]
    plan_of_all = {"name": name, "parameters": parameters, "rounds": cells[-1]["round"], "seed": 0,
                   "beside": {"parameter": beside[0], "shown": shown}, "cells": cells}
    save(args.output / "run.json", made | {"title": f"{name}: {about}", "experiment": plan_of_all})
    done = []
    for number, planned in enumerate(cells, 1):
        settings = planned["settings"]
        label = ", ".join(settings[key] for key, values in parameters.items() if len(values) > 1)
        progress(f"[{number}/{len(cells)}] round {planned['round']}: {label}")
        begun, measured, problems = time.time(), {}, []
        try:
            measured = measure(settings)
        except Failed as e:
            problems = [f"{label}: {e}"]
            progress(f"{problems[0]}\n")
        done.append(planned | {
            "started": int(begun), "seconds": time.time() - begun, "series": [], "evidence": None,
            "measures": list(measured.values()), "problems": problems})
        save(args.output / "cells" / planned["id"] / "cell.json", done[-1])
    progress("")
    sys.stdout.flush()
    subprocess.run([args.fathom, "report", args.output], check=True)
    return done


def save(path: Path, value: dict) -> None:
    """It is there as a whole or not at all, also after a crash of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".json.new")
    with open(new, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
