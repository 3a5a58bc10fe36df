#!/usr/bin/env python3
"""What users notice of a disk's being kept as it was at an instant, for a backup to read: writes most of which find their
block of 64 KiB not copied yet. QEMU's storage daemon does it with its filter copy-before-write ("fleecing").

Both copy to a file in the same directory. The same number of writes is made each time, so that as much is copied.
"""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import experiment
import loads
from bars import aligned, compared
from cases import FATHOM, QSD, Case
from experiment import Measures
from process import Failed, running
from subjects import FILE_SIZE, Bench, prepared, qsd

KEPT = "{}, kept"
WHO = [FATHOM, KEPT.format(FATHOM), QSD, KEPT.format(QSD)]
CASES = [Case("shm", "randwrite", "4k", 1), Case("shm", "randwrite", "4k", 32),
         Case("disk", "randwrite", "4k", 1), Case("disk", "randwrite", "4k", 32)]
SHOWN = {"iops": "IOPS", "latency.p50": "p50 ns", "latency.p99": "p99 ns"}
# Of the file's blocks.
WRITES = FILE_SIZE // (64 << 10) // 2


@contextmanager
def fathom(bench: Bench, case: Case, socket: Path, is_kept: bool):
    api, disk = bench.run_dir / "api.sock", bench.path(case.storage)
    command = [bench.fathom, "serve", disk, "--vhost-user", socket, "--api", api,
               "--cpus", bench.server_cpu]

    with running(command, socket, None):
        if not is_kept:
            yield
            return
        backup = [bench.fathom, "backup"]
        subprocess.run([*backup, "start", api, "--scratch", disk.parent], check=True,
                       stdout=subprocess.DEVNULL)
        yield
        stopped = subprocess.run([*backup, "stop", api], check=False, capture_output=True, text=True)
        # (It ends when the load, which is the virtual machine, leaves; not before.)
        if "has let go of the disk" not in stopped.stderr:
            raise Failed(f"it was not kept: {stopped.stderr}")


@contextmanager
def storage_daemon(bench: Bench, case: Case, socket: Path, is_kept: bool):
    disk = bench.path(case.storage)
    direct = "on" if case.storage == "disk" else "off"
    file = f"driver=file,aio=io_uring,cache.direct={direct},discard=unmap"
    nodes = ["--blockdev", f"{file},filename={disk},node-name={'disk' if is_kept else 'n'}"]
    kept = disk.with_suffix(".kept")
    if is_kept:
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", kept, str(FILE_SIZE)], check=True)
        nodes += ["--blockdev", f"{file},filename={kept},node-name=k",
                  "--blockdev", "driver=qcow2,file=k,node-name=kept",
                  "--blockdev", "driver=copy-before-write,file=disk,target=kept,node-name=n",
                  "--blockdev", "driver=snapshot-access,file=n,node-name=as-it-was"]
    try:
        with running(qsd(socket, *nodes), socket, bench.server_cpu):
            yield
    finally:
        kept.unlink(missing_ok=True)


def measure(bench: Bench, case: Case, who: str) -> Measures:
    socket, is_kept = bench.run_dir / "disk.sock", who in (KEPT.format(FATHOM), KEPT.format(QSD))
    server = fathom if who.startswith(FATHOM) else storage_daemon
    with server(bench, case, socket, is_kept):
        return loads.bench(bench.load_cpu, bench.client, bench.seconds, "--vhost-user", socket,
                           "--rw", case.rw, "--bs", case.bs, "--iodepth", case.depth,
                           "--cpus", bench.load_cpu, "--number-ios", WRITES)[1]


def main() -> None:
    parser = experiment.options("fathom-backups", __doc__, rounds=5, seconds=60)
    parser.add_argument("fathom", type=Path, help="the program (of a release build)")
    args = parser.parse_args()
    cases = {case.name: case for case in CASES}
    groups = [[{"case": name, "who": who} for who in WHO] for name in cases]
    with prepared(args, {case.storage for case in CASES}) as bench:
        fixed = bench.settings() | {"writes": str(WRITES)}
        cells = experiment.run(
            args, bench.machine(), "backups", "writes while the disk is kept as it was",
            experiment.plan(groups, args.rounds, fixed), ("who", SHOWN),
            lambda cell: measure(bench, cases[cell["case"]], cell["who"]))
        for pair in [(WHO[1], WHO[0]), (WHO[3], WHO[2]), (WHO[1], WHO[3])]:
            print(f"\n{aligned(compared(cells, SHOWN, 'who', pair))}")


if __name__ == "__main__":
    main()
