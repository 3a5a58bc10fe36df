"""`fathom img` and qemu-img on whole images, with all CPUs.

The sources are in the page cache, and a measurement is the best of several runs: what other
programs, writing back and the allocation of memory do to a run only ever adds to it, and may make
ten times as long as it is of one that takes a second.
"""

import os
import random
import resource
import time
from pathlib import Path

from cases import FATHOM, Case
from experiment import Measures, measures
from process import run

BLOCK = 1 << 20
LIMIT = 900  # seconds

# Bytes that the disk's images have; half of them are data. They have to fit into the page cache.
DEFAULT_SIZE = 1 << 30

# Of the same command for one measurement.
RUNS = 5

# Both tools write through the page cache and end with a flush: qemu-img's own
# default does not.
CACHE = ["-t", "writeback"]


class Images:
    """What the commands work on: made once, in `directory`."""

    def __init__(self, directory: Path, size: int):
        base = directory / f"fathom-bench-{os.getpid()}.img"
        self.size = size
        self.raw = base.with_suffix(".half.raw")
        self.equal = base.with_suffix(".half.qcow2")
        self.target = base.with_suffix(".target.qcow2")

    def make(self) -> None:
        fill(self.raw, self.size)
        run(["qemu-img", "convert", *CACHE, "-f", "raw", "-O", "qcow2", self.raw, self.equal],
            LIMIT)

    def remove(self) -> None:
        for image in (self.raw, self.equal, self.target):
            image.unlink(missing_ok=True)


def fill(path: Path, size: int) -> None:
    """A disk as it is after some years: data and holes of some MiB each; of the
    data a third is text, a third are records, a third does not compress."""
    rng = random.Random(1)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 10)))
             for _ in range(4000)]
    blocks = [make() for _ in range(16)
              for make in (lambda: text(rng, words), lambda: records(rng), lambda: noise(rng))]
    rng.shuffle(blocks)
    with open(path, "wb") as file:
        at, left, written = 0, size // 2, 0
        while left > 0:
            run = min(rng.randint(1, 8) * BLOCK, left)
            file.seek(at)
            for start in range(0, run, BLOCK):
                file.write(blocks[written % len(blocks)][:run - start])
                written += 1
            at, left = at + 2 * run, left - run
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def text(rng: random.Random, words: list[str]) -> bytes:
    return " ".join(rng.choices(words, k=BLOCK // 4))[:BLOCK].encode()


def records(rng: random.Random) -> bytes:
    first = rng.randrange(1 << 32)
    record = 48
    made = (number.to_bytes(8, "little") + rng.randbytes(6) + bytes(18)
            + (4096 * number).to_bytes(8, "little") + b"inode\0\0\0"
            for number in range(first, first + BLOCK // record + 1))
    return b"".join(made)[:BLOCK]


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(BLOCK)


def measure(case: Case, subject: str, images: Images, fathom: Path) -> Measures:
    program = [fathom, "img"] if subject == FATHOM else ["qemu-img"]
    command = [*program, *arguments(case, subject, images)]
    seconds, cpu_seconds = map(min, zip(*(timed(command, images) for _ in range(RUNS))))
    return measures({"throughput": images.size / seconds / 1e6, "time": seconds,
                     "cpu.time": cpu_seconds}, RUNS)


def timed(command: list, images: Images) -> tuple[float, float]:
    """Seconds, and seconds of CPU time, that the command takes."""
    images.target.unlink(missing_ok=True)
    # What others have left to be written is not this command's.
    os.sync()
    for source in (images.raw, images.equal):
        read(source)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run(command, LIMIT)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return seconds, user + system


def read(path: Path) -> None:
    """Into the page cache."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(4 * BLOCK)
        while file.readinto(buffer):
            pass


def arguments(case: Case, subject: str, images: Images) -> list:
    if case.rw == "compare":
        return ["compare", "-f", "raw", "-F", "qcow2", images.raw, images.equal]
    options = ["-c"] if case.rw == "convert-compressed" else []
    if subject != FATHOM:
        # Out of order and with as many requests as it takes: its fastest.
        options += ["-W", "-m", "16"]
    return ["convert", *options, *CACHE, "-f", "raw", "-O", "qcow2", images.raw, images.target]


def parse_size(text: str) -> int:
    """Bytes, or with M or G."""
    units = {"M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper())
    size = int(text[:-1]) * unit if unit else int(text)
    if size < BLOCK:
        raise ValueError("an image has a MiB at least")
    return size
