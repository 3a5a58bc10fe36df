#!/usr/bin/env python3
"""What a disk's requests notice of others that come and go: its latencies while its server adds and
removes disks, and while it does not.

A worker has one CPU, the load another; the server's other threads take what these leave.
"""

import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import experiment
import loads
from api import Api
from bars import aligned, compared
from cases import FATHOM, Case
from experiment import Measures
from process import Failed, running
from subjects import NULL_SIZE, Bench, prepared

QUIET, CHURN = "alone", "others come and go"
CASES = [Case("null", "randread", "4k", 1), Case("null", "randread", "4k", 32),
         Case("disk", "randread", "4k", 32)]
SHOWN = {"iops": "IOPS", "latency.p50": "p50 ns", "latency.p99": "p99 ns"}
# Seconds between one that goes and the next that comes.
PAUSE = 0.1


@contextmanager
def churning(bench: Bench, api: Path):
    """Disks in images come and go as long as the block lasts; gives how many times."""
    image, end, rounds, failed = bench.run_dir / "churn.qcow2", threading.Event(), [0], []
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "1G"], check=True)
    disk = {"image": str(image), "format": "qcow2", "vhost-user": str(bench.run_dir / "churn")}

    def churn() -> None:
        server = Api(api)
        try:
            while not end.wait(PAUSE):
                server.ask("PUT", "/v1/disks/churn", disk)
                server.ask("DELETE", "/v1/disks/churn")
                rounds[0] += 1
        except (Failed, OSError) as e:
            failed.append(e)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield rounds
    finally:
        end.set()
        thread.join()
        if failed:
            raise Failed(f"disks cannot come and go: {failed[0]}")


def measure(bench: Bench, case: Case, who: str) -> Measures:
    disk = f"null:{NULL_SIZE}" if case.storage == "null" else bench.path(case.storage)
    front_end, api = bench.run_dir / "disk.sock", bench.run_dir / "api.sock"
    command = [bench.fathom, "serve", disk, "--vhost-user", front_end, "--api", api,
               "--cpus", bench.server_cpu]

    def load() -> Measures:
        return loads.bench(bench.load_cpu, bench.client, bench.seconds, "--vhost-user", front_end,
                           "--rw", case.rw, "--bs", case.bs, "--iodepth", case.depth,
                           "--cpus", bench.load_cpu, "--runtime", f"{bench.seconds}s",
                           "--ramp-time", "500ms")[1]

    with running(command, front_end, None):
        if who == QUIET:
            return load()
        with churning(bench, api) as rounds:
            measured = load()
            if rounds[0] < bench.seconds:
                raise Failed(f"only {rounds[0]} disks came and went")
            return measured


def main() -> None:
    parser = experiment.options("fathom-churn", __doc__, rounds=5, seconds=5)
    parser.add_argument("fathom", type=Path, help="the program (of a release build)")
    args = parser.parse_args()
    cases = {case.name: case for case in CASES}
    groups = [[{"case": name, "who": who} for who in (QUIET, CHURN)] for name in cases]
    with prepared(args, {case.storage for case in CASES}) as bench:
        fixed = bench.settings() | {"server": FATHOM, "pause": f"{PAUSE:g}s"}
        cells = experiment.run(
            args, bench.machine(), "churn", "a disk while others come and go",
            experiment.plan(groups, args.rounds, fixed), ("who", SHOWN),
            lambda cell: measure(bench, cases[cell["case"]], cell["who"]))
        print(f"\n{aligned(compared(cells, SHOWN, 'who', (CHURN, QUIET)))}")


if __name__ == "__main__":
    main()
