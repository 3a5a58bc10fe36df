#!/usr/bin/env python3
"""What it costs a server to be shut in: the same program with its cage and without, interleaved."""

import experiment
from bars import aligned, compared
from cases import FATHOM, Case
from experiment import Measures
from subjects import Bench, prepared

# Of a load on a disk that holds nothing, all is the server's.
CASES = [Case("null", "randread", "4k", 1), Case("null", "randread", "4k", 32),
         Case("null", "randread", "4k", 128), Case("disk", "randread", "4k", 32),
         Case("disk", "randwrite", "4k", 32)]
SHOWN = {"iops": "IOPS", "cpu.server": "CPU us"}


def measure(bench: Bench, case: Case, sandbox: str) -> Measures:
    measured = bench.measure(case, f"{FATHOM} --sandbox {sandbox}")
    return {figure: measured[figure] for figure in SHOWN}


def main() -> None:
    args = experiment.options("fathom-cage", __doc__, rounds=5, seconds=2).parse_args()
    args.fathom = experiment.TARGET / "release" / "fathom"
    cases = {case.name: case for case in CASES}
    groups = [[{"case": name, "sandbox": mode} for mode in ("off", "on")] for name in cases]
    with prepared(args, {case.storage for case in CASES}) as bench:
        cells = experiment.run(
            args, bench.machine(), "cage", "what it costs to be shut in",
            experiment.plan(groups, args.rounds, bench.settings()), ("sandbox", SHOWN),
            lambda cell: measure(bench, cases[cell["case"]], cell["sandbox"]))
        print(f"\n{aligned(compared(cells, SHOWN, 'sandbox', ('on', 'off')))}")


if __name__ == "__main__":
    main()
