#!/usr/bin/env python3
"""What it costs to mark what is changed: writes to a disk with a dirty bitmap, and without."""

import subprocess
from pathlib import Path

import experiment
import loads
from bars import aligned, compared
from cases import FATHOM, Case
from experiment import Measures
from process import running
from subjects import Bench, prepared

WITHOUT, WITH = "no bitmap", "a bitmap"
CASES = [Case("shm", "randwrite", "4k", 32), Case("disk", "randwrite", "4k", 32)]
SHOWN = {"iops": "IOPS", "latency.p50": "p50 ns", "latency.p99": "p99 ns"}


def measure(bench: Bench, case: Case, who: str) -> Measures:
    front_end, api = bench.run_dir / "disk.sock", bench.run_dir / "api.sock"
    command = [bench.fathom, "serve", bench.path(case.storage), "--vhost-user", front_end,
               "--api", api, "--cpus", bench.server_cpu]

    def bitmap(what: str) -> None:
        if who == WITH:
            subprocess.run([bench.fathom, "bitmap", what, api, "b"], check=True)

    with running(command, api, None):
        # (Nothing is marked in it yet: each block costs most the first time.)
        bitmap("add")
        try:
            return loads.bench(bench.load_cpu, bench.client, bench.seconds, "--vhost-user", front_end,
                               "--rw", case.rw, "--bs", case.bs, "--iodepth", case.depth,
                               "--cpus", bench.load_cpu, "--runtime", f"{bench.seconds}s")[1]
        finally:
            bitmap("remove")


def main() -> None:
    parser = experiment.options("fathom-bitmaps", __doc__, rounds=7, seconds=3)
    parser.add_argument("fathom", type=Path, help="the program (of a release build)")
    args = parser.parse_args()
    cases = {case.name: case for case in CASES}
    groups = [[{"case": name, "who": who} for who in (WITHOUT, WITH)] for name in cases]
    with prepared(args, {case.storage for case in CASES}) as bench:
        fixed = bench.settings() | {"server": FATHOM}
        cells = experiment.run(
            args, bench.machine(), "bitmaps", "writes to a disk with and without a dirty bitmap",
            experiment.plan(groups, args.rounds, fixed), ("who", SHOWN),
            lambda cell: measure(bench, cases[cell["case"]], cell["who"]))
        print(f"\n{aligned(compared(cells, SHOWN, 'who', (WITH, WITHOUT)))}")


if __name__ == "__main__":
    main()
