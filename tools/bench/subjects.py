"""Starts servers, has them loaded, and asks fio for the host's own figure."""

import os
import re
import sys
import tempfile
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import images
import img
import loads
import nbd
import spdk
from cases import FATHOM, FATHOM_RAW, HOST, QSD, SPDK, Case
from experiment import Measures
from noise import observed
from process import running

NULL_SIZE = 1 << 40
FILE_SIZE = 1 << 30
# Writes, of 4 KiB each, to a new image of clusters of 64 KiB on a file of that size: most of them
# copy a cluster.
COPIES = 8192
# Of which the best counts.
COPY_RUNS = 3


@dataclass
class Bench:
    """Where things are and how long a measurement lasts."""

    fathom: Path  # that is measured
    client: Path  # that loads it
    disk_dir: Path
    run_dir: Path
    server_cpu: int
    load_cpu: int
    seconds: float
    img: img.Images
    spdk: str | None

    def path(self, storage: str) -> Path:
        directory = Path("/dev/shm") if storage == "shm" else self.disk_dir
        return directory / f"fathom-bench-{os.getpid()}.img"

    def machine(self) -> dict:
        """A run.json that describes this one: it has read a block of its own program."""
        return loads.bench(self.load_cpu, self.client, 0, self.client, "--buffered",
                           "--rw", "read", "--number-ios", "1")[0]

    def settings(self) -> dict[str, str]:
        """Those that are the same in all cells."""
        return {"runtime": f"{self.seconds:g}s", "server-cpu": str(self.server_cpu),
                "load-cpu": str(self.load_cpu)}

    def prepare(self, storages: set[str]) -> None:
        """Writes the files in full: holes would be served without the disk."""
        if "img" in storages:
            self.img.make()
        block = os.urandom(1 << 20)
        files = {"shm" if s == "nbd" else s for s in storages} - {"null", "img"}
        for storage in sorted(files):
            with open(self.path(storage), "wb") as file:
                for _ in range(FILE_SIZE // len(block)):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())

    def clean_up(self) -> None:
        self.img.remove()
        for storage in ("disk", "shm"):
            images.remove(self.path(storage))

    def measure(self, case: Case, subject: str) -> Measures:
        if case.storage == "img":
            return observed(lambda: img.measure(case, subject, self.img, self.fathom),
                            os.sched_getaffinity(0))
        if case.copies_in_memory:
            # As short as a run is, whatever else happens can only make it look dearer.
            runs = [self._measure(case, subject) for _ in range(COPY_RUNS)]
            return min(runs, key=lambda measures: measures["cpu.server"]["value"])
        return self._measure(case, subject)

    def _measure(self, case: Case, subject: str) -> Measures:
        cpus = {self.server_cpu, self.load_cpu}
        if subject == HOST:
            return observed(lambda: self._fio(case), cpus)
        if subject == FATHOM_RAW:
            case, subject = replace(case, image="raw"), FATHOM
        socket = self.run_dir / "disk.sock"
        uri = f"nbd+unix:///?socket={socket}"
        if case.storage == "nbd":
            command = nbd.server(case, subject, socket, self.fathom, self.path("shm"))
            target = ["--nbd", uri]
        else:
            images.make(case, self.path(case.storage))
            serve = {QSD: self._qsd, SPDK: self._spdk}.get(subject, self._fathom)
            command = serve(case, socket, subject)
            target = ["--vhost-user", socket] + (spdk.LOAD if subject == SPDK else [])
        with running(command, socket, self.server_cpu) as server:
            if case.storage == "nbd" and not nbd.is_full(subject):
                nbd.fill(case, uri, self.client, self.load_cpu)
            if case.by == "bench":
                return observed(lambda: self._load(case, target), cpus, server)
            return observed(lambda: nbd.load(case, uri, self.seconds, self.load_cpu), cpus, server)

    def _fathom(self, case: Case, socket: Path, subject: str) -> list:
        disk = f"null:{NULL_SIZE}" if case.storage == "null" else self.image(case)
        options = subject.removeprefix(FATHOM).split()
        if case.image != "raw":
            options += ["--format", case.format]
        if case.is_encrypted:
            key = self.run_dir / "key"
            key.write_text(images.KEY, encoding="utf-8")
            options += ["--key", f"file:{key}"]
        if case.delay:
            options += ["--filter", f"delay:read={case.delay}"]
        return [self.fathom, "serve", disk, "--vhost-user", socket,
                "--api", self.run_dir / "control.sock", *options]

    def _qsd(self, case: Case, socket: Path, _subject: str) -> list:
        if case.storage == "null":
            blockdev = f"driver=null-co,size={NULL_SIZE},read-zeroes=off"
            blockdevs = ["--blockdev", f"{blockdev},node-name=n"]
        else:
            direct = "on" if case.storage == "disk" else "off"
            blockdevs = images.blockdevs(case, self.image(case), direct)
        return qsd(socket, *blockdevs)

    def _spdk(self, case: Case, socket: Path, _subject: str) -> list:
        disk = NULL_SIZE if case.storage == "null" else self.image(case)
        return spdk.server(self.spdk, disk, socket, self.server_cpu)

    def image(self, case: Case) -> Path:
        return images.path(case, self.path(case.storage))

    def _load(self, case: Case, target: list) -> Measures:
        # An image that is being filled is another one after a while: nothing is left out. In
        # memory, who is fast would soon have copied all of it, and then only be writing.
        ramp = "500ms" if case.state == "full" else "0s"
        end = ["--runtime", f"{self.seconds}s"]
        if case.copies_in_memory:
            end = ["--number-ios", COPIES]
        return loads.bench(
            self.load_cpu, self.client, self.seconds, *target, "--rw", case.rw, "--bs", case.bs,
            "--iodepth", case.depth, "--queues", case.connections, "--wait", case.wait,
            "--cpus", self.load_cpu, *end, "--ramp-time", ramp)[1]

    def _fio(self, case: Case) -> Measures:
        """fio at its best: at depth 1 a plain pread or pwrite, else io_uring
        with everything registered. The page cache is /dev/shm's own storage."""
        engine = ["--ioengine=psync"]
        if case.depth > 1:
            engine = ["--ioengine=io_uring", "--fixedbufs", "--registerfiles",
                      f"--iodepth={case.depth}"]
        rw, bs = case.rw, case.bs
        if case.state == "backed":
            # What a copy on write asks of the disk: a cluster read for each one written.
            rw, bs = "randrw", "64k"
        return loads.fio(self.load_cpu, self.seconds, rw, bs,
                         f"--filename={self.path(case.storage)}", "--ramp_time=500ms",
                         f"--direct={int(case.storage == 'disk')}", *engine)


def qsd(socket: Path, *blockdevs) -> list:
    """QEMU's storage daemon; the node `n` is its disk."""
    export = ("type=vhost-user-blk,id=e,node-name=n,num-queues=1,writable=on,"
              f"addr.type=unix,addr.path={socket}")
    return ["qemu-storage-daemon", *blockdevs, "--export", export]


@contextmanager
def prepared(args: Namespace, storages: set[str], size: int = img.DEFAULT_SIZE,
             spdk_program: str | None = None):
    """A bench whose files are there as long as the block lasts. Whatever ends that, it says where
    the run is."""
    server, load = choose_cpus(args)
    with tempfile.TemporaryDirectory(prefix="fathom-bench-") as run_dir:
        bench = Bench(args.fathom, args.fathom, args.dir, Path(run_dir), server, load, args.seconds,
                      img.Images(args.dir, size), spdk_program)
        try:
            bench.prepare(storages)
            yield bench
        finally:
            bench.clean_up()
            if args.output.exists():
                print(f"\nTo see it again: {args.fathom} report {args.output}", flush=True)


def choose_cpus(args: Namespace) -> tuple[int, int]:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        sys.exit("error: two CPUs are needed, one for the server and one for the load")
    server = disk_interrupt_cpu(allowed) if args.server_cpu is None else args.server_cpu
    others = [cpu for cpu in allowed if cpu != server]
    load = others[0] if args.load_cpu is None else args.load_cpu
    if server == load:
        sys.exit("error: --server-cpu and --load-cpu must differ")
    return server, load


def disk_interrupt_cpu(allowed: list[int]) -> int:
    """The CPU that has taken most of the disks' interrupts: where an operator
    would put a disk's server. Every server is measured there."""
    with open("/proc/interrupts", encoding="utf-8") as table:
        cpus = [int(name.removeprefix("CPU")) for name in table.readline().split()]
        taken = dict.fromkeys(cpus, 0)
        for line in table:
            if re.search(r"-req\.|nvme\d+q|ahci|scsi|blkif", line):
                for cpu, count in zip(cpus, line.split()[1:]):
                    taken[cpu] += int(count)
    return max(allowed, key=lambda cpu: (taken.get(cpu, 0), -cpu))
