#!/usr/bin/env python3
"""An image on Ceph: Fathom against QEMU's driver, and the kernel's where it is there.

A cluster of one OSD in memory is started, or one is named by --conf, and an image of its pool `rbd` written in
full. Each round loads it, by vhost-user, through Fathom and through QEMU's storage daemon, and directly as the
kernel's block device (`rbd map`), if this machine can. Printed are, for each round and as medians, requests a
second and CPU time of a request, both in parts of QEMU's. Servers and loads have all CPUs; the cluster shares
them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import loads
from experiment import TARGET
from noise import observed
from process import Failed, run, running
from subjects import qsd

FATHOM, QSD, KRBD = "fathom", "qsd", "krbd"
SIZE = 1  # GiB
# What is to be reached, of QEMU's.
BARS = {"iops": 1.3, "cpu": 0.8}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom")
    parser.add_argument("--conf", type=Path,
                        help="of a cluster that is there; its image fathom-bench is replaced")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3,
                        help="per measurement, default: %(default)s")
    parser.add_argument("--depth", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rw", nargs="+", default=["randread", "randwrite"],
                        help="default: randread and randwrite")
    return parser.parse_args()


@contextmanager
def cluster(conf: Path | None):
    """A configuration's path."""
    if conf:
        yield conf
        return
    command = ["cargo", "run", "--quiet", "--package", "fathom-tests", "--example", "cluster", "1",
               "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        path = own.stdout.readline().strip()
        if not path:
            raise Failed("no cluster: `sh tools/setup.sh cluster` installs Ceph")
        try:
            yield Path(path)
        finally:
            own.stdin.close()


def server(args: argparse.Namespace, who: str, conf: Path, socket: Path) -> list:
    if who == FATHOM:
        return [args.fathom, "serve", f"rbd:rbd/fathom-bench?conf={conf}", "--vhost-user", socket,
                "--api", socket.with_name("control")]
    rbd = f"driver=rbd,node-name=n,pool=rbd,image=fathom-bench,conf={conf},cache.direct=on"
    return qsd(socket, "--blockdev", rbd)


@contextmanager
def mapped(conf: Path):
    """The image as a block device."""
    device = run(["rbd", "--conf", conf, "map", "rbd/fathom-bench"], 20).strip()
    try:
        yield device
    finally:
        run(["rbd", "--conf", conf, "unmap", device], 20)


def measure(args: argparse.Namespace, place: Path, conf: Path, who: str,
            rw: str) -> dict[str, float]:
    load = ["--rw", rw, "--bs", "4k", "--iodepth", str(args.depth), "--runtime", f"{args.seconds}s",
            "--ramp-time", "500ms"]

    def bench(pid: int | None, *target) -> dict[str, float]:
        found = observed(lambda: loads.bench(None, args.fathom, args.seconds, *target, *load)[1],
                         os.sched_getaffinity(0), pid)
        cpu = found.get("cpu.server") or found["cpu.load"]
        return {"iops": found["iops"]["value"], "cpu": cpu["value"]}

    if who == KRBD:
        with mapped(conf) as device:
            return bench(None, device)
    socket = place / "disk"
    with running(server(args, who, conf, socket), socket, None) as pid:
        return bench(pid, "--vhost-user", socket)


def can_map(conf: Path) -> bool:
    try:
        with mapped(conf):
            return True
    except Failed as why:
        print(f"krbd: not measured: {why}")
        return False


def compare(args: argparse.Namespace, place: Path, conf: Path, rw: str,
            subjects: list[str]) -> bool:
    ratios = {who: {"iops": [], "cpu": []} for who in subjects}
    for turn in range(args.rounds):
        first = turn % len(subjects)
        found = {who: measure(args, place, conf, who, rw)
                 for who in subjects[first:] + subjects[:first]}
        for who in subjects:
            for figure, values in ratios[who].items():
                values.append(found[who][figure] / found[QSD][figure])
        print(f"{rw}: " + ", ".join(f"{who} {found[who]['iops']:.0f}/s {found[who]['cpu']:.1f} us"
                                    for who in subjects))
        sys.stdout.flush()
    met = True
    for who in subjects:
        if who == QSD:
            continue
        iops, cpu = (median(ratios[who][figure]) for figure in ("iops", "cpu"))
        reached = iops >= BARS["iops"] and cpu <= BARS["cpu"]
        verdict = f" (bars {BARS['iops']} and {BARS['cpu']}: {'yes' if reached else 'NO'})"
        print(f"{rw}, depth {args.depth}, median of {args.rounds}: {who} {iops:.3f} of QSD's requests, "
              f"{cpu:.3f} of its CPU time{verdict if who == FATHOM else ''}")
        met &= reached or who != FATHOM
    return met


def main() -> None:
    args = parse()
    with cluster(args.conf) as conf, tempfile.TemporaryDirectory(prefix="fathom-rbd-") as directory:
        place = Path(directory)
        block = place / "block"
        image = f"rbd:rbd/fathom-bench?conf={conf}"
        subprocess.run(["dd", "if=/dev/urandom", f"of={block}", "bs=1M", f"count={SIZE << 10}",
                        "status=none"], check=True)
        run([args.fathom, "img", "convert", "-f", "raw", "-O", "raw", block, image], 120)
        block.unlink()
        subjects = [FATHOM, QSD] + ([KRBD] if can_map(conf) else [])
        met = [compare(args, place, conf, rw, subjects) for rw in args.rw]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
