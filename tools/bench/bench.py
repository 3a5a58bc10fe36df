#!/usr/bin/env python3
"""Fathom against qemu-storage-daemon, nbdkit, qemu-nbd, qemu-img and the host itself.

Every round measures every case for every subject, one after the other, so that
what is compared was measured within seconds. The server has one CPU to itself,
the load another. Figures are medians over the rounds, ratios are medians of the
rounds' ratios. Commands on whole images have all CPUs. On a busy machine none
of this means anything.
"""

import argparse
import fnmatch
import json
import os
import re
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import img
import table
from cases import Case, all_cases
from result import Failed, Result
from subjects import Bench

# Percent of the two CPUs' time; a disk's interrupts alone can take some.
DISTURBED = 10

ROOT = Path(__file__).resolve().parent.parent.parent


def arguments() -> argparse.Namespace:
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", action="append",
                        help="cases whose name matches, such as 'disk-*'; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the cases' names and leave")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=float, default=2, help="per measurement, default: 2")
    parser.add_argument("--retries", type=int, default=0, metavar="N",
                        help="measure again, up to N times, while other programs take more "
                        "than a tenth of the CPUs; the quietest counts")
    parser.add_argument("--fathom", type=Path, default=target / "release" / "fathom",
                        help="the program, default: %(default)s")
    parser.add_argument("--dir", type=Path, default=target,
                        help="where the file on disk is made, default: %(default)s")
    parser.add_argument("--server-cpu", type=int,
                        help="default: the one that takes the disks' interrupts")
    parser.add_argument("--load-cpu", type=int, help="default: the first other one")
    parser.add_argument("--img-size", type=img.parse_size, metavar="SIZE",
                        default=img.DEFAULT_SIZE,
                        help="of the images that img-* work on, half of it data; default: 1G")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.add_argument("--check", action="store_true", help="fail when a bar is not reached")
    return parser.parse_args()


def disk_interrupt_cpu(allowed: list[int]) -> int:
    """The CPU that has taken most of the disks' interrupts: where an operator
    would put a disk's server. Every server is measured there."""
    with open("/proc/interrupts", encoding="utf-8") as table:
        cpus = [int(name.removeprefix("CPU")) for name in table.readline().split()]
        taken = dict.fromkeys(cpus, 0)
        for line in table:
            if re.search(r"-req\.|nvme\d+q|ahci|scsi|blkif", line):
                for cpu, count in zip(cpus, line.split()[1:]):
                    taken[cpu] += int(count)
    return max(allowed, key=lambda cpu: (taken.get(cpu, 0), -cpu))


def choose_cpus(args: argparse.Namespace) -> tuple[int, int]:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        sys.exit("error: two CPUs are needed, one for the server and one for the load")
    server = disk_interrupt_cpu(allowed) if args.server_cpu is None else args.server_cpu
    others = [cpu for cpu in allowed if cpu != server]
    load = others[0] if args.load_cpu is None else args.load_cpu
    if server == load:
        sys.exit("error: --server-cpu and --load-cpu must differ")
    return server, load


def check_programs(fathom: Path) -> None:
    for program in ("qemu-storage-daemon", "qemu-nbd", "qemu-img", "nbdkit", "nbdcopy", "fio",
                    "taskset"):
        if shutil.which(program) is None:
            sys.exit(f"error: {program} is not installed; `make setup` installs it")
    if not fathom.is_file():
        sys.exit(f"error: {fathom} is not built; run cargo build --release")
    if not (fathom.with_name("examples") / "floor").is_file():
        sys.exit(f"error: no examples/floor beside {fathom}; "
                 "run cargo build --release --package fathom-nbd --example floor")


def first_line(*command: str) -> str:
    out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return out.splitlines()[0] if out else "unknown"


def environment(bench: Bench) -> dict:
    cpu = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "kernel": platform.release(),
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "fathom": first_line(str(bench.fathom), "--version"),
        "qemu-storage-daemon": first_line("qemu-storage-daemon", "--version"),
        "qemu-img": first_line("qemu-img", "--version"),
        "nbdkit": first_line("nbdkit", "--version"),
        "fio": first_line("fio", "--version"),
        "load_average": os.getloadavg()[0],
        "server_cpu": bench.server_cpu,
        "load_cpu": bench.load_cpu,
    }


def quietest(bench: Bench, case: Case, subject: str, retries: int) -> Result:
    """The least disturbed of some measurements; the first quiet one ends it."""
    best = bench.measure(case, subject)
    while best.others_percent > DISTURBED and retries > 0:
        retries -= 1
        again = bench.measure(case, subject)
        if again.others_percent < best.others_percent:
            best = again
    return best


def measure(bench: Bench, cases: list[Case], rounds: int, retries: int) -> table.Rounds:
    results: table.Rounds = {c.name: {s: [] for s in c.subjects} for c in cases}
    total, done = rounds * sum(len(c.subjects) for c in cases), 0
    for turn in range(rounds):
        for case in cases:
            # Another one goes first in each round.
            first = turn % len(case.subjects)
            for subject in case.subjects[first:] + case.subjects[:first]:
                done += 1
                progress(f"[{done}/{total}] round {turn + 1}: {case.name}, {subject}")
                try:
                    result = quietest(bench, case, subject, retries)
                except Failed as e:
                    progress("")
                    print(f"{case.name}, {subject}: {e}", file=sys.stderr)
                    result = None
                results[case.name][subject].append(result)
    progress("")
    return results


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def write_json(path: Path, env: dict, results: table.Rounds, outcomes: list[dict]) -> None:
    plain = {case: {subject: [r and r.as_dict() for r in rounds]
                    for subject, rounds in subjects.items()}
             for case, subjects in results.items()}
    path.write_text(json.dumps(
        {"environment": env, "measurements": plain, "bars": outcomes}, indent=2) + "\n",
        encoding="utf-8")


def main() -> int:
    args = arguments()
    wanted = args.only or ["*"]
    cases = [c for c in all_cases() if any(fnmatch.fnmatch(c.name, p) for p in wanted)]
    if args.list or not cases:
        print("\n".join(c.name for c in cases or all_cases()))
        return 0 if cases else 2
    check_programs(args.fathom)
    server, load = choose_cpus(args)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as run_dir:
        bench = Bench(args.fathom, args.dir, Path(run_dir), server, load, args.seconds,
                      img.Images(args.dir, args.img_size))
        env = environment(bench)
        print("\n".join(f"{key}: {value}" for key, value in env.items()), flush=True)
        if env["load_average"] > 0.5:
            print("warning: other programs are running; the ratios will be off", file=sys.stderr)
        try:
            bench.prepare({c.storage for c in cases})
            results = measure(bench, cases, args.rounds, args.retries)
        finally:
            bench.clean_up()
    outcomes = table.bars(results)
    print(f"\n{table.measurements(cases, results)}")
    if outcomes:
        print(f"\n{table.verdicts(outcomes)}")
    if args.json:
        write_json(args.json, env, results, outcomes)
    failed = any(r is None for s in results.values() for rounds in s.values() for r in rounds)
    missed = any(not o["reached"] for o in outcomes)
    return 1 if failed or (args.check and missed) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
