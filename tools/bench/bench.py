#!/usr/bin/env python3
"""Fathom against qemu-storage-daemon, nbdkit, qemu-nbd, qemu-img and the host; and SPDK, if given.

Every round measures every case for every subject, one after the other, so that
what is compared was measured within seconds. The server has one CPU to itself,
the load another. Figures are medians over the rounds, ratios are medians of the
rounds' ratios. Commands on whole images have all CPUs. On a busy machine none
of this means anything.
"""

import argparse
import fnmatch
import os
import re
import shutil
import sys
from pathlib import Path

import bars
import experiment
import img
import spdk
from cases import SPDK, Case, all_cases
from experiment import Measures
from process import Failed, run
from subjects import Bench, prepared

# Percent of the two CPUs' time; a disk's interrupts alone can take some.
DISTURBED = 10

# Beside each other on a terminal; the page and the files of `fathom report` have all.
SHOWN = {"iops": "IOPS", "latency.p50": "p50 ns", "cpu.server": "CPU us", "time": "seconds"}


def arguments() -> argparse.Namespace:
    parser = experiment.options("fathom-bench", __doc__, rounds=3, seconds=2)
    parser.add_argument("--fathom", type=Path, default=experiment.TARGET / "release" / "fathom",
                        help="the program, default: %(default)s")
    parser.add_argument("--spdk", metavar="PROGRAM",
                        help="SPDK's vhost, to be measured as well, on raw disks: 24.01 or later")
    parser.add_argument("--only", metavar="PATTERN", action="append",
                        help="cases whose name matches, such as 'disk-*'; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the cases' names and leave")
    parser.add_argument("--retries", type=int, default=0, metavar="N",
                        help="measure again, up to N times, while other programs take more "
                        "than a tenth of the CPUs; the quietest counts")
    parser.add_argument("--img-size", type=img.parse_size, metavar="SIZE",
                        default=img.DEFAULT_SIZE,
                        help="of the images that img-* work on, half of it data; default: 1G")
    parser.add_argument("--check", action="store_true", help="fail when a bar is not reached")
    return parser.parse_args()


def check_programs(fathom: Path, vhost: str | None) -> None:
    for program in ("qemu-storage-daemon", "qemu-nbd", "qemu-img", "nbdkit", "nbdcopy", "fio",
                    "taskset"):
        if shutil.which(program) is None:
            sys.exit(f"error: {program} is not installed; `make setup` installs it")
    if not fathom.is_file():
        sys.exit(f"error: {fathom} is not built; run cargo build --release")
    if not (fathom.with_name("examples") / "floor").is_file():
        sys.exit(f"error: no examples/floor beside {fathom}; "
                 "run cargo build --release --package fathom-nbd --example floor")
    problem = spdk.problem(vhost) if vhost else None
    if problem:
        sys.exit(f"error: --spdk: {problem}")


def version(program: str) -> str:
    found = re.search(r"\d+(\.\d+)+", run([program, "--version"], 10))
    return found[0] if found else "unknown"


def quietest(bench: Bench, case: Case, subject: str, retries: int) -> Measures:
    """The least disturbed of some measurements; the first quiet one ends it."""
    best = bench.measure(case, subject)
    while best["others"]["value"] > DISTURBED and retries > 0:
        retries -= 1
        again = bench.measure(case, subject)
        best = min(best, again, key=lambda measures: measures["others"]["value"])
    return best


def measure(args: argparse.Namespace, cases: dict[str, Case]) -> int:
    """The exit status."""
    storages = {case.storage for case in cases.values()}
    with prepared(args, storages, args.img_size, args.spdk) as bench:
        fixed = bench.settings() | {program: version(program) for program in ("nbdkit", "fio")}
        if args.spdk:
            fixed["spdk"] = version(args.spdk)
        machine = bench.machine()
        machine["environment"]["qemu"] = version("qemu-storage-daemon")
        groups = [[{"case": case.name, "who": who} for who in case.subjects
                   if args.spdk or who != SPDK] for case in cases.values()]
        cells = experiment.run(
            args, machine, "make bench", "Fathom and others in its place",
            experiment.plan(groups, args.rounds, fixed), ("who", SHOWN),
            lambda cell: quietest(bench, cases[cell["case"]], cell["who"], args.retries))
        verdicts = bars.verdicts(cells)
        print(f"\n{bars.aligned(verdicts)}")
    missed = args.check and any(line[-1] == "NO" for line in verdicts)
    return int(missed or any(cell["problems"] for cell in cells))


def main() -> int:
    args = arguments()
    cases = {case.name: case for case in all_cases()
             if any(fnmatch.fnmatch(case.name, pattern) for pattern in args.only or ["*"])}
    if args.list or not cases:
        print("\n".join(cases or (case.name for case in all_cases())))
        return 0 if cases else 2
    check_programs(args.fathom, args.spdk)
    if os.getloadavg()[0] > 0.5:
        print("warning: other programs are running; the ratios will be off", file=sys.stderr)
    return measure(args, cases)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
