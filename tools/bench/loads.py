"""Programs that make load from one CPU, and what they measure."""

import json
import tempfile
import time
from pathlib import Path

from experiment import Measures, measures
from process import run

# Seconds beyond those that were asked for, after which a load hangs.
PATIENCE = 60


def bench(cpu: int | None, fathom: Path, seconds: float, *arguments) -> tuple[dict, Measures]:
    """`fathom bench`: its run.json, which describes this machine, and what it measures."""
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as output:
        run([fathom, "bench", *arguments, "--output", output], seconds + PATIENCE, cpu)
        made, cell = (json.loads(Path(output, file).read_text(encoding="utf-8"))
                      for file in ("run.json", "cells/1-1/cell.json"))
    return made, {measure["name"]: measure for measure in cell["measures"]}


def fio(cpu: int, seconds: float, rw: str, bs: str, *arguments) -> Measures:
    out = run(["fio", "--name=bench", f"--rw={rw}", f"--bs={bs}", "--norandommap", "--time_based",
               f"--runtime={round(seconds * 1000)}ms", "--thread", "--output-format=json",
               *arguments], seconds + PATIENCE, cpu)
    job = json.loads(out[out.index("{"):])["jobs"][0]
    side = job["read" if "read" in rw else "write"]
    percentile = side["clat_ns"]["percentile"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return measures({
        "iops": side["iops"], "throughput": side["bw_bytes"] / 1e6,
        "latency.p50": percentile["50.000000"], "latency.p99": percentile["99.000000"],
        "cpu.load": busy / max(side["iops"], 1) * 1e6}, side["total_ios"])


def nbdcopy(cpu: int, uri: str, size: int) -> Measures:
    # Its own default.
    requests = size // (256 << 10)
    start = time.monotonic()
    run(["nbdcopy", uri, "null:"], PATIENCE, cpu)
    seconds = time.monotonic() - start
    return measures({"iops": requests / seconds, "throughput": size / seconds / 1e6}, requests)
