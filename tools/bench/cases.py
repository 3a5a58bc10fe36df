"""What is measured, and how fast it has to be."""

from dataclasses import dataclass

FATHOM = "fathom"
FATHOM_NO_POLL = "fathom --poll off"
FATHOM_REGISTERED = "fathom --register-memory"
QSD = "qemu-storage-daemon"
HOST = "host"


@dataclass(frozen=True)
class Case:
    """One load on one kind of storage."""

    storage: str  # null, disk (a file, O_DIRECT) or shm (a file in /dev/shm)
    rw: str
    bs: str
    depth: int
    wait: str = "interrupt"

    @property
    def name(self) -> str:
        poll = "-poll" if self.wait == "poll" else ""
        return f"{self.storage}-{self.rw}-{self.bs}-{self.depth}{poll}"

    @property
    def subjects(self) -> list[str]:
        """Who is measured; on null there is no host to compare with."""
        subjects = [FATHOM, QSD]
        if self.storage != "null":
            subjects.append(HOST)
        if any(bar.case == self.name and bar.subject == FATHOM_NO_POLL for bar in BARS):
            subjects.append(FATHOM_NO_POLL)
        if self.storage == "disk" and self.depth == 32:
            subjects.append(FATHOM_REGISTERED)
        return subjects


@dataclass(frozen=True)
class Bar:
    """A ratio that has to be reached: at least `need` when that is what more
    of the figure means, else at most."""

    case: str
    text: str
    figure: str  # iops, p50_us or server_cpu_us
    against: str
    need: float
    aim: float
    subject: str = FATHOM

    @property
    def more_is_better(self) -> bool:
        return self.figure == "iops"

    def met(self, ratio: float, wanted: float) -> bool:
        return ratio >= wanted if self.more_is_better else ratio <= wanted


BARS = [
    Bar("null-randread-4k-128", "null, depth 128: IOPS against QSD", "iops", QSD, 4.5, 6),
    Bar("null-randread-4k-1-poll", "null, depth 1, polling: p50 against QSD", "p50_us", QSD,
        1 / 5, 1 / 8),
    Bar("null-randread-4k-1", "null, depth 1: p50 against QSD", "p50_us", QSD, 0.55, 0.47),
    Bar("disk-randread-4k-32", "disk, depth 32: IOPS against the host", "iops", HOST, 0.90, 0.95),
    Bar("disk-randread-4k-128", "disk, depth 128: IOPS against the host", "iops", HOST,
        0.94, 0.97),
    Bar("disk-randread-4k-1", "disk, depth 1: IOPS against the host's psync", "iops", HOST,
        0.72, 0.80),
    Bar("disk-randread-4k-32", "disk, depth 32, --poll off: CPU against QSD", "server_cpu_us",
        QSD, 0.65, 0.5, FATHOM_NO_POLL),
    Bar("disk-randread-4k-32", "disk, depth 32: CPU against QSD", "server_cpu_us", QSD,
        1.0, 0.65),
    Bar("shm-randread-4k-32", "/dev/shm, depth 32: IOPS against QSD", "iops", QSD, 2.5, 3),
]


def all_cases() -> list[Case]:
    cases = [Case("null", "randread", "4k", 1, "poll")]
    for storage in ("null", "disk", "shm"):
        for rw, bs in (("randread", "4k"), ("randwrite", "4k"), ("read", "256k")):
            cases += [Case(storage, rw, bs, depth) for depth in (1, 32, 128)]
    return cases
