#!/usr/bin/env python3
"""A disk on an NBD server that is far away: what of the link's depth and delay reaches the guest.

Each round asks a server that answers each read after a delay, directly (`fathom bench --nbd`) and through
those who make a virtual machine's disk of it: Fathom, and QEMU's storage daemon, both by vhost-user. Printed
are, for each round and as medians, reads a second in parts of what depth and delay allow, and the CPU time
that the middle takes for a read.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import loads
from experiment import TARGET
from noise import observed
from process import running
from subjects import choose_cpus, qsd

SIZE = "null:1T"
BAR = 0.95
DIRECT, FATHOM, QSD = "directly", "fathom", "qsd"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3,
                        help="per measurement, default: %(default)s")
    parser.add_argument("--depth", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--delays", type=float, nargs="+", default=[1, 10],
                        help="in milliseconds, default: 1 and 10")
    parser.add_argument("--server-cpu", type=int, help="default: as make bench's")
    parser.add_argument("--load-cpu", type=int, help="default: as make bench's")
    return parser.parse_args()


def middle(args: argparse.Namespace, who: str, origin: Path, socket: Path) -> list:
    if who == FATHOM:
        return [args.fathom, "serve", f"nbd+unix:///?socket={origin}", "--vhost-user", socket,
                "--api", socket.with_name("control")]
    nbd = f"driver=nbd,node-name=n,server.type=unix,server.path={origin}"
    return qsd(socket, "--blockdev", nbd)


def measure(args: argparse.Namespace, place: Path, cpus: tuple[int, int], who: str,
            delay: float) -> tuple[float, float]:
    """Of what depth and delay allow, and the middle's CPU time for a read in microseconds."""
    server_cpu, load_cpu = cpus
    origin, socket = place / "origin", place / "disk"
    serve = [args.fathom, "serve", SIZE, "--nbd", f"unix:{origin}", "--api", place / "origin-api",
             "--filter", f"delay:read={delay}ms"]
    load = ["--rw", "randread", "--bs", "4k", "--iodepth", str(args.depth),
            "--runtime", f"{args.seconds}s", "--ramp-time", "500ms"]

    def bench(server: int, *target) -> tuple[float, float]:
        found = observed(lambda: loads.bench(load_cpu, args.fathom, args.seconds, *target, *load)[1],
                         set(cpus), server)
        part = found["iops"]["value"] * delay / 1000 / args.depth
        return part, found["cpu.server"]["value"]

    # The far side shares the load's CPU: it is another machine's.
    with running(serve, origin, load_cpu) as far:
        if who == DIRECT:
            return bench(far, "--nbd", f"nbd+unix:///?socket={origin}")
        with running(middle(args, who, origin, socket), socket, server_cpu) as server:
            return bench(server, "--vhost-user", socket)


def compare(args: argparse.Namespace, place: Path, cpus: tuple[int, int], delay: float) -> bool:
    parts = {DIRECT: [], FATHOM: [], QSD: []}
    costs = {DIRECT: [], FATHOM: [], QSD: []}
    subjects = list(parts)
    for turn in range(args.rounds):
        first = turn % len(subjects)
        for who in subjects[first:] + subjects[:first]:
            part, cost = measure(args, place, cpus, who, delay)
            parts[who].append(part)
            costs[who].append(cost)
        print(f"{delay} ms: " + ", ".join(f"{who} {parts[who][-1]:.3f}" for who in subjects))
        sys.stdout.flush()
    reached = median(parts[FATHOM])
    of_direct = median(one / other for one, other in zip(parts[FATHOM], parts[DIRECT]))
    of_qsd = median(one / other for one, other in zip(parts[FATHOM], parts[QSD]))
    verdict = "yes" if reached >= BAR else "NO"
    print(f"{delay} ms, depth {args.depth}, median of {args.rounds}: {reached:.3f} of what they allow "
          f"(bar {BAR}: {verdict}), {of_direct:.3f} of what is read directly, {of_qsd:.3f} of QSD's; "
          f"CPU time {median(costs[FATHOM]):.2f} us a read, QSD {median(costs[QSD]):.2f}")
    return reached >= BAR


def main() -> None:
    args = parse()
    cpus = choose_cpus(args)
    with tempfile.TemporaryDirectory(prefix="fathom-link-") as directory:
        met = [compare(args, Path(directory), cpus, delay) for delay in args.delays]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
