#!/usr/bin/env python3
"""Disks that share a pool's threads, against one disk that has as many threads to itself.

Each round loads one disk that holds nothing, served by two threads of its own, and then many such disks,
served by a pool of two threads. Printed are, for each round and as medians: what the disks do together,
in parts of the one disk; what CPU time the server takes for a request, likewise; and what the slowest of
them does, in parts of their mean. Loads and servers have all CPUs.

The load is the same. By NBD: as many processes, each with as many connections. By vhost-user, where a disk
has one front-end: one process, which has as many queues, or as many front-ends with as many queues in all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from experiment import TARGET
from process import Failed, run, running

SIZE = "null:1T"
# Until all loads are there, in seconds.
WARM_UP = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5,
                        help="per measurement, default: %(default)s")
    parser.add_argument("--disks", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--depth", type=int, default=16,
                        help="requests in flight of each queue, default: %(default)s")
    parser.add_argument("--queues", type=int, default=2,
                        help="or connections, of each disk in the pool, default: %(default)s: each "
                             "thread has one of them")
    parser.add_argument("--by", choices=["vhost-user", "nbd"], nargs="+",
                        default=["vhost-user", "nbd"], help="default: both")
    return parser.parse_args()


def served(args: argparse.Namespace, place: Path) -> tuple[float, list[int]]:
    """A time, and the requests that each disk had had by then."""
    text = run([args.fathom, "info", place / "control", "--json"], 20)
    told = json.loads(text)
    infos = [told] if "workers" in told else told.values()
    counts = [sum(worker["requests"] for worker in info["workers"]) for info in infos]
    return time.monotonic(), counts


def cpu_time(pid: int) -> float:
    """In seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def front_ends(args: argparse.Namespace, queues: int, sockets: list[Path]) -> list[list]:
    program = args.fathom.parent / "examples" / "front_ends"
    return [[program, str(queues), str(args.depth), *sockets]]


def clients(args: argparse.Namespace, uris: list[str]) -> list[list]:
    load = ["--rw", "randread", "--iodepth", str(args.depth), "--queues", str(args.queues),
            "--runtime", "1h"]
    return [[args.fathom, "bench", "--nbd", uri, *load] for uri in uris]


def rates(args: argparse.Namespace, place: Path, server: int,
          commands: list[list]) -> tuple[list[float], float]:
    """Requests per second, by disk, while all loads are there; and the server's CPU time for each."""
    loads = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
             for command in commands]
    try:
        time.sleep(WARM_UP)
        begin, before = served(args, place)
        used = -cpu_time(server)
        time.sleep(args.seconds)
        used += cpu_time(server)
        end, after = served(args, place)
        if any(load.poll() is not None for load in loads) or not all(before):
            raise Failed("a load is missing")
    finally:
        for load in loads:
            load.kill()
            load.wait()
    each = [(late - early) / (end - begin) for early, late in zip(before, after)]
    return each, used / (sum(after) - sum(before))


def nbd(place: Path, export: str) -> str:
    return f"nbd+unix:///{export}?socket={place / 'nbd'}"


def alone(args: argparse.Namespace, place: Path, by: str) -> tuple[list[float], float]:
    command = [args.fathom, "serve", SIZE, "--iothreads", "2", "--api", place / "control"]
    if by == "nbd":
        with running([*command, "--nbd", f"unix:{place / 'nbd'}"], place / "nbd",
                     None) as server:
            return rates(args, place, server, clients(args, [nbd(place, "")] * args.disks))
    queues = args.disks * args.queues
    command += ["--queues", str(queues), "--vhost-user", place / "alone"]
    with running(command, place / "alone", None) as server:
        return rates(args, place, server, front_ends(args, queues, [place / "alone"]))


def pooled(args: argparse.Namespace, place: Path, by: str) -> tuple[list[float], float]:
    names = [f"d{number}" for number in range(args.disks)]
    tables = [f"[[disk]]\nname = '{name}'\nimage = '{SIZE}'\nvhost-user = '{place / name}'\n"
              "pool = 'p'\n" for name in names]
    head = f"api = {{ socket = '{place / 'control'}' }}\n"
    if by == "nbd":
        # (A disk that has such clients takes parts of blocks, which costs something.)
        head += f"[nbd]\nlisten = ['unix:{place / 'nbd'}']\n"
    file = place / "conf"
    file.write_text(f"{head}[pool.p]\nthreads = 2\n{''.join(tables)}", encoding="utf-8")
    if by == "nbd":
        loads = clients(args, [nbd(place, name) for name in names])
    else:
        loads = front_ends(args, args.queues, [place / name for name in names])
    with running([args.fathom, "serve", "--config", file], place / names[-1], None) as server:
        return rates(args, place, server, loads)


def compare(args: argparse.Namespace, place: Path, by: str) -> None:
    shares, costs, fairness = [], [], []
    for turn in range(args.rounds):
        # Each is the first in every other round.
        first = alone(args, place, by) if turn % 2 == 0 else None
        each, of_each = pooled(args, place, by)
        one, of_one = first or alone(args, place, by)
        shares.append(sum(each) / sum(one))
        costs.append(of_each / of_one)
        fairness.append(min(each) / mean(each))
        print(f"{by}: one disk {sum(one):.0f}/s, {args.disks} disks {sum(each):.0f}/s: "
              f"{shares[-1]:.3f}; CPU time {costs[-1]:.3f}; slowest/mean {fairness[-1]:.3f}")
        sys.stdout.flush()
    print(f"{by}, median of {args.rounds}: together/one {median(shares):.3f} (bar 0.9), CPU time "
          f"{median(costs):.3f}, slowest/mean {median(fairness):.3f} (bar 0.8)")


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="fathom-pools-") as directory:
        for by in args.by:
            compare(args, Path(directory), by)


if __name__ == "__main__":
    main()
