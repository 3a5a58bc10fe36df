"""NBD servers, and the programs besides `fathom bench` that load them."""

import json
from pathlib import Path

from cases import FATHOM, FATHOM_SHM, NBD_FLOOR, NBDKIT, NBDKIT_SHM, Case
from result import Result

MEMORY_SIZE = 1 << 30
COPY_SIZE = 4 << 30
# nbdcopy's own default.
COPY_REQUEST = 256 << 10


def size(case: Case) -> int:
    """Bytes of the memory disk; what is in /dev/shm has its own size."""
    return COPY_SIZE if case.by == "nbdcopy" else MEMORY_SIZE


def is_full(subject: str) -> bool:
    """Whether the server has data from the start: holes would be read faster."""
    return subject not in (FATHOM, NBDKIT)


def server(case: Case, subject: str, socket: Path, fathom: Path, file: Path) -> list[str]:
    """A server of one export on a Unix socket."""
    if subject in (FATHOM, FATHOM_SHM):
        disk = f"memory:{size(case)}" if subject == FATHOM else str(file)
        control = socket.with_name("control.sock")
        return [str(fathom), "serve", disk, "--nbd", f"unix:{socket}", "--control", str(control)]
    if subject == NBD_FLOOR:
        return [str(fathom.with_name("examples") / "floor"), str(socket), str(size(case))]
    if subject == NBDKIT:
        return ["nbdkit", "-f", "-U", str(socket), "memory", str(size(case))]
    if subject == NBDKIT_SHM:
        return ["nbdkit", "-f", "-U", str(socket), "file", str(file)]
    return ["qemu-nbd", "-t", "-e", "16", "-f", "raw", "-k", str(socket), str(file)]


def fill(case: Case, uri: str) -> list[str]:
    """Writes all of a memory disk."""
    block = 1 << 20
    return ["bench", "--nbd", uri, "--rw", "write", "--bs", str(block), "--iodepth", "4",
            "--number-ios", str(size(case) // block)]


def load(case: Case, uri: str, seconds: float) -> list[str]:
    if case.by == "nbdcopy":
        return ["nbdcopy", uri, "null:"]
    return ["fio", "--name=nbd", "--ioengine=nbd", f"--uri={uri}", f"--rw={case.rw}",
            f"--bs={case.bs}", f"--iodepth={case.depth}", f"--size={MEMORY_SIZE}",
            "--norandommap", "--time_based", f"--runtime={seconds}s", "--thread",
            "--output-format=json"]


def result(case: Case, out: str, seconds: float, server_seconds: float) -> Result:
    """From what the load printed, how long it ran and the server's CPU time."""
    if case.by == "nbdcopy":
        requests = size(case) // COPY_REQUEST
        return Result(
            iops=requests / seconds, mb_per_s=size(case) / seconds / 1e6,
            p50_us=None, p99_us=None, load_cpu_us=None,
            server_cpu_us=server_seconds / requests * 1e6)
    job = json.loads(out[out.index("{"):])["jobs"][0]
    side = job["write" if "write" in case.rw else "read"]
    percentile = side["clat_ns"]["percentile"]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Result(
        iops=side["iops"], mb_per_s=side["bw_bytes"] / 1e6,
        p50_us=percentile["50.000000"] / 1e3, p99_us=percentile["99.000000"] / 1e3,
        load_cpu_us=busy / max(side["iops"], 1) * 1e6,
        server_cpu_us=server_seconds / max(side["total_ios"], 1) * 1e6)
