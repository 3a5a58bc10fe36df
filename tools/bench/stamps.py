#!/usr/bin/env python3
"""What Fathom's stamps and histograms cost: the same daemon with them and
compiled without them (--cfg fathom_unstamped), interleaved; and with the trace
ring switched on.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import experiment
from cases import FATHOM, Case
from experiment import Measures
from subjects import prepared

# What is asked of each: of null the daemon's CPU time, of a disk what it lets through.
CASES = {"cpu.server": Case("null", "randread", "4k", 128),
         "iops": Case("disk", "randread", "4k", 32)}
SHOWN = {"cpu.server": "CPU us", "iops": "IOPS"}


def build(target: Path, flags: str) -> Path:
    env = dict(os.environ, RUSTFLAGS=flags, CARGO_TARGET_DIR=str(target))
    command = ["cargo", "build", "--quiet", "--release", "--package", "fathom-cli"]
    subprocess.run(command, check=True, env=env)
    return target / "release" / "fathom"


def main() -> None:
    args = experiment.options("fathom-stamps", __doc__, rounds=5, seconds=1).parse_args()
    builds = {"unstamped": build(experiment.TARGET / "unstamped", "--cfg fathom_unstamped")}
    builds["stamped"] = builds["traced"] = args.fathom = build(experiment.TARGET, "")
    groups = [[{"case": case.name, "build": name} for name in builds] for case in CASES.values()]
    with prepared(args, {case.storage for case in CASES.values()}) as bench:
        trace = f"{FATHOM} --trace {bench.run_dir / 'trace'}"

        def measure(settings: dict[str, str]) -> Measures:
            name = settings["build"]
            figure, case = next(one for one in CASES.items() if one[1].name == settings["case"])
            served = replace(bench, fathom=builds[name])
            return {figure: served.measure(case, trace if name == "traced" else FATHOM)[figure]}

        experiment.run(args, bench.machine(), "stamps", "what stamps and histograms cost",
                       experiment.plan(groups, args.rounds, bench.settings()), ("build", SHOWN),
                       measure)


if __name__ == "__main__":
    main()
