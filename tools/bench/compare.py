#!/usr/bin/env python3
"""Two builds of Fathom against each other: of each case, whether the new one is faster, slower, or neither.

Each round measures every case with both programs, one after the other; the next round begins with the other one.
Within a round the ratio of both figures is taken. An exact sign-flip test over the rounds decides, with Holm's
correction, so that in 19 of 20 runs of equal programs no case at all is called faster or slower. The number of
rounds follows from --minutes and not from what was measured. `fathom bench` of the new program loads both.

The server has one CPU to itself, the load another. On a busy machine rounds differ more, and more of them are
needed: the last column has how many it takes to see a difference of 2%.
"""

import argparse
import fnmatch
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import experiment
import paired
from bars import aligned
from cases import FATHOM, Case
from experiment import Measures
from process import Failed, run
from subjects import Bench, prepared

OLD, NEW = "old", "new"

# What is compared of each case.
CASES: list[tuple[Case, str]] = [
    (Case("null", "randread", "4k", 1, "poll"), "latency.p50"),
    (Case("null", "randread", "4k", 1), "latency.p50"),
    (Case("null", "randread", "4k", 128), "iops"),
    (Case("null", "randread", "4k", 32, delay="1ms"), "cpu.server"),
    (Case("disk", "randread", "4k", 1), "iops"),
    (Case("disk", "randread", "4k", 32), "cpu.server"),
    (Case("shm", "randread", "4k", 32), "iops"),
    (Case("shm", "randwrite", "4k", 32), "iops"),
    (Case("shm", "randread", "4k", 32, image="qcow2"), "iops"),
    (Case("shm", "randwrite", "4k", 32, image="qcow2", state="empty"), "iops"),
    (Case("shm", "randread", "4k", 32, image="luks"), "iops"),
    (Case("nbd", "randread", "4k", 1), "latency.p50"),
    (Case("nbd", "randread", "4k", 32), "iops"),
    (Case("nbd", "randread", "4k", 32, connections=4), "iops"),
    (Case("img", "convert"), "time"),
]
SHOWN = {"iops": "IOPS", "latency.p50": "p50 ns", "cpu.server": "CPU us", "time": "seconds"}
# Seconds of a measurement beyond its own: the start of the server, the ramp and the end.
BESIDES = 1.0


def arguments() -> argparse.Namespace:
    parser = experiment.options("fathom-compare", __doc__, rounds=0, seconds=1)
    parser.add_argument("old", type=Path, metavar="OLD", help="program of the last release")
    parser.add_argument("new", type=Path, metavar="NEW", help="program to compare with it")
    parser.add_argument("--minutes", type=float, default=20,
                        help="of the whole run, from which --rounds follows; default: %(default)s")
    parser.add_argument("--only", metavar="PATTERN", action="append",
                        help="cases whose name matches, such as 'disk-*'; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the cases' names and leave")
    parser.add_argument("--check", action="store_true", help="fail when a case is slower")
    args = parser.parse_args()
    args.fathom = args.new
    return args


def rounds_in(minutes: float, cases: int, seconds: float) -> int:
    """As many as fit, at most those that the test can count."""
    fit = int(minutes * 60 / (cases * 2 * (seconds + BESIDES)))
    return max(1, min(fit, paired.MAX_ROUNDS))


def differences(cells: list[dict], case: str, figure: str) -> list[float]:
    """Of each round in which both were measured: the logarithm of new against old, positive when new is faster."""
    values = {(cell["settings"]["program"], cell["round"]): measure["value"]
              for cell in cells if cell["settings"]["case"] == case
              for measure in cell["measures"] if measure["name"] == figure}
    sign = 1 if experiment.FIGURES[figure][1] == "higher" else -1
    rounds = sorted(turn for program, turn in values if program == OLD)
    pairs = [(values[OLD, turn], values.get((NEW, turn), 0)) for turn in rounds]
    return [sign * math.log(new / old) for old, new in pairs if new > 0 and old > 0]


def told(verdicts: list[paired.Verdict]) -> str:
    """Lines below a heading."""
    lines = [["case", "new/old", "95% of this case", "p", "rounds", "2% takes", "verdict"]]
    for one in verdicts:
        known = math.isfinite(one.low)
        lines.append([one.name, f"{one.speed:.3f}", f"{one.low:.3f} to {one.high:.3f}" if known else "-",
                      f"{one.p:.2g}", str(one.rounds), str(one.to_see), one.word])
    return aligned(lines)


def version(program: Path) -> str:
    found = re.search(r"\d+(\.\d+)+\S*", run([program, "--version"], 10))
    return found[0] if found else "unknown"


def measured_by(bench: Bench, cases: dict[str, Case], programs: dict[str, Path],
                settings: dict[str, str]) -> Measures:
    served = replace(bench, fathom=programs[settings["program"]])
    return served.measure(cases[settings["case"]], FATHOM)


def main() -> int:
    args = arguments()
    chosen = [(case, figure) for case, figure in CASES
              if any(fnmatch.fnmatch(case.name, pattern) for pattern in args.only or ["*"])]
    if args.list or not chosen:
        print("\n".join(case.name for case, _ in chosen or CASES))
        return 0 if chosen else 2
    programs = {OLD: args.old, NEW: args.new}
    for program in programs.values():
        if not program.is_file():
            sys.exit(f"error: {program}: no such program; name two builds of fathom")
    if args.rounds > paired.MAX_ROUNDS:
        sys.exit(f"error: --rounds {args.rounds}: the exact test can count {paired.MAX_ROUNDS} rounds")
    rounds = args.rounds or rounds_in(args.minutes, len(chosen), args.seconds)
    cases = {case.name: case for case, _ in chosen}
    groups = [[{"case": name, "program": program} for program in programs] for name in cases]
    with prepared(args, {case.storage for case in cases.values()}) as bench:
        fixed = bench.settings() | {name: version(program) for name, program in programs.items()}
        cells = experiment.run(
            args, bench.machine(), "compare", "two builds of Fathom by turns",
            experiment.plan(groups, rounds, fixed), ("program", SHOWN),
            lambda settings: measured_by(bench, cases, programs, settings))
    verdicts = paired.verdicts({f"{case.name}: {SHOWN[figure]}": differences(cells, case.name, figure)
                                for case, figure in chosen})
    print(f"\n{told(verdicts)}")
    slower = args.check and any(one.word == "slower" for one in verdicts)
    return int(slower or any(cell["problems"] for cell in cells))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
