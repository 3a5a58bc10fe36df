"""NBD servers, and the programs that load them."""

from pathlib import Path

import loads
from cases import FATHOM, FATHOM_SHM, NBD_FLOOR, NBDKIT, NBDKIT_SHM, Case
from experiment import Measures
from process import run

MEMORY_SIZE = 1 << 30
COPY_SIZE = 4 << 30


def size(case: Case) -> int:
    """Bytes of the memory disk; what is in /dev/shm has its own size."""
    return COPY_SIZE if case.by == "nbdcopy" else MEMORY_SIZE


def is_full(subject: str) -> bool:
    """Whether the server has data from the start: holes would be read faster."""
    return subject not in (FATHOM, NBDKIT)


def server(case: Case, subject: str, socket: Path, fathom: Path, file: Path) -> list:
    """A server of one export on a Unix socket."""
    if subject in (FATHOM, FATHOM_SHM):
        disk = f"memory:{size(case)}" if subject == FATHOM else file
        control = socket.with_name("control.sock")
        return [fathom, "serve", disk, "--nbd", f"unix:{socket}", "--api", control]
    if subject == NBD_FLOOR:
        return [fathom.with_name("examples") / "floor", socket, size(case)]
    if subject == NBDKIT:
        return ["nbdkit", "-f", "-U", socket, "memory", size(case)]
    if subject == NBDKIT_SHM:
        return ["nbdkit", "-f", "-U", socket, "file", file]
    return ["qemu-nbd", "-t", "-e", "16", "-f", "raw", "-k", socket, file]


def fill(case: Case, uri: str, fathom: Path, cpu: int) -> None:
    """Writes all of a memory disk."""
    block = 1 << 20
    run([fathom, "bench", "--nbd", uri, "--rw", "write", "--bs", block, "--iodepth", "4",
         "--number-ios", size(case) // block], 120, cpu)


def load(case: Case, uri: str, seconds: float, cpu: int) -> Measures:
    """By other programs than `fathom bench`."""
    if case.by == "nbdcopy":
        return loads.nbdcopy(cpu, uri, size(case))
    return loads.fio(cpu, seconds, case.rw, case.bs, "--ioengine=nbd", f"--uri={uri}",
                     f"--iodepth={case.depth}", f"--size={MEMORY_SIZE}")
