#!/usr/bin/env python3
"""How exact filters are: what `delay` adds with thousands of requests in
flight, and what `throttle` lets through.

The stage `queue` of the last 32768 requests, from the trace, is compared with the delay that was
asked for; IOPS with the rate that was. Run it on a machine that does nothing else: what is late is
also whatever else the machine does.
"""

import json
from pathlib import Path

import experiment
from cases import FATHOM, Case
from experiment import Measures, measures
from process import run
from subjects import Bench, prepared

# Requests in flight on each queue, and queues.
DEPTHS = [(1, 1), (128, 1), (1024, 1), (1024, 4)]
DELAYS_MS = [1, 20, 200]
RATES = [300, 3000, 30000]

SHOWN = {"iops": "IOPS", "rate.error": "off %", "late.p50": "late ns: p50", "late.p99": "p99",
         "late.max": "max", "cpu.server": "CPU us"}


def measure(bench: Bench, settings: dict[str, str]) -> Measures:
    depth, queues = map(int, settings["in-flight"].split("x"))
    trace = bench.run_dir / "trace"
    case = Case("null", "randread", "4k", depth, connections=queues)
    measured = bench.measure(case, f"{FATHOM} --filter {settings['filter']} --trace {trace}")
    kind, asked = settings["filter"].split("=")
    if kind == "throttle:iops-total":
        off = measured["iops"]["value"] / int(asked) - 1
        return measured | measures({"rate.error": off * 100})
    lines = run([bench.fathom, "trace", trace, "--json"], 300).splitlines()
    stages = (json.loads(line).get("stages") for line in lines)
    asked_ns = int(asked.removesuffix("ms")) * 1e6
    late = sorted(stage["queue_ns"] - asked_ns for stage in stages if stage)
    at = {name: late[min(int(share * len(late)), len(late) - 1)]
          for name, share in (("late.p50", 0.5), ("late.p99", 0.99), ("late.max", 1))}
    return measured | measures(at, len(late))


def main() -> None:
    parser = experiment.options("fathom-filters", __doc__, rounds=1, seconds=10)
    parser.add_argument("fathom", type=Path, help="the program (of a release build)")
    args = parser.parse_args()
    points = [{"filter": f"delay:read={ms}ms", "in-flight": f"{depth}x{queues}"}
              for ms in DELAYS_MS for depth, queues in DEPTHS]
    points += [{"filter": f"throttle:iops-total={rate}", "in-flight": "32x1"} for rate in RATES]
    with prepared(args, {"null"}) as bench:
        fixed = bench.settings() | {"who": FATHOM}
        experiment.run(args, bench.machine(), "filters", "how exact filters are",
                       experiment.plan([[point] for point in points], args.rounds, fixed),
                       ("who", SHOWN), lambda settings: measure(bench, settings))


if __name__ == "__main__":
    main()
