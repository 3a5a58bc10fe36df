"""What is measured, and how fast it has to be."""

from dataclasses import dataclass

from experiment import FIGURES

FATHOM = "fathom"
FATHOM_NO_POLL = "fathom --poll off"
FATHOM_REGISTERED = "fathom --register-memory"
FATHOM_RAW = "fathom on raw"
QSD = "qsd"
SPDK = "spdk"
HOST = "host"
# Over NBD; without more words, on a memory disk.
NBDKIT = "nbdkit"
FATHOM_SHM = "fathom on /dev/shm"
NBDKIT_SHM = "nbdkit on /dev/shm"
QEMU_NBD = "qemu-nbd on /dev/shm"
# The least that a server can do: crates/nbd/examples/floor.rs.
NBD_FLOOR = "floor"
# On whole images.
QEMU_IMG = "qemu-img"


ENCRYPTED = ("luks", "encrypted")


@dataclass(frozen=True)
class Case:
    """One load on one kind of storage, or one command on whole images."""

    storage: str  # null, disk (a file, O_DIRECT), shm (a file in /dev/shm), nbd or img
    rw: str  # of img: the command
    bs: str = ""
    depth: int = 0
    wait: str = "interrupt"
    image: str = "raw"  # raw, qcow2, qed, luks, or encrypted: qcow2 with that
    state: str = "full"  # of an image: full, empty or backed (by a full raw one)
    by: str = "bench"  # over NBD: bench, fio or nbdcopy
    connections: int = 1
    delay: str = ""  # of each read, by the filter: a slow disk

    @property
    def name(self) -> str:
        if self.by == "nbdcopy":
            return "nbd-nbdcopy"
        if self.storage == "img":
            return f"img-{self.rw}"
        by = "" if self.by == "bench" else f"-{self.by}"
        connections = "" if self.connections == 1 else f"-x{self.connections}"
        poll = "-poll" if self.wait == "poll" else ""
        image = "" if self.image == "raw" else f"-{self.image}-{self.state}"
        delay = f"-{self.delay}" if self.delay else ""
        return f"{self.storage}{delay}{by}{image}-{self.rw}-{self.bs}-{self.depth}{connections}{poll}"

    @property
    def format(self) -> str:
        return "qcow2" if self.image == "encrypted" else self.image

    @property
    def is_encrypted(self) -> bool:
        return self.image in ENCRYPTED

    @property
    def copies_in_memory(self) -> bool:
        return self.state == "backed" and self.storage == "shm"

    @property
    def subjects(self) -> list[str]:
        """Who is measured, SPDK only where it is given; on null there is no host to compare with."""
        if self.by == "nbdcopy":
            return [FATHOM, NBDKIT]
        if self.storage == "img":
            return [FATHOM, QEMU_IMG]
        if self.storage == "nbd":
            floor = [NBD_FLOOR] if self.by == "fio" else []
            return [FATHOM, FATHOM_SHM, NBDKIT, NBDKIT_SHM, QEMU_NBD] + floor
        if self.delay:
            return [FATHOM, FATHOM_NO_POLL]
        subjects = [FATHOM, QSD]
        if self.state == "backed" and self.storage == "disk":
            return [FATHOM, QSD, HOST]
        if self.image != "raw":
            return [FATHOM, FATHOM_RAW, QSD] if self.state == "full" else subjects
        subjects.append(SPDK)
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
    figure: str  # of experiment.FIGURES
    against: str
    need: float
    aim: float
    subject: str = FATHOM

    def met(self, ratio: float, wanted: float) -> bool:
        more_is_better = FIGURES[self.figure][1] == "higher"
        return ratio >= wanted if more_is_better else ratio <= wanted


BARS = [
    Bar("null-randread-4k-128", "null, depth 128: IOPS against QSD", "iops", QSD, 4.5, 6),
    Bar("null-randread-4k-1-poll", "null, depth 1, polling: p50 against QSD", "latency.p50", QSD,
        1 / 5, 1 / 8),
    Bar("null-randread-4k-1", "null, depth 1: p50 against QSD", "latency.p50", QSD, 0.55, 0.47),
    Bar("disk-randread-4k-32", "disk, depth 32: IOPS against the host", "iops", HOST, 0.90, 0.95),
    Bar("disk-randread-4k-128", "disk, depth 128: IOPS against the host", "iops", HOST,
        0.94, 0.97),
    Bar("disk-randread-4k-1", "disk, depth 1: IOPS against the host's psync", "iops", HOST,
        0.72, 0.80),
    Bar("disk-randread-4k-32", "disk, depth 32, --poll off: CPU against QSD", "cpu.server",
        QSD, 0.65, 0.5, FATHOM_NO_POLL),
    Bar("disk-randread-4k-32", "disk, depth 32: CPU against QSD", "cpu.server", QSD,
        1.0, 0.65),
    # The delay is longer than ten wake-ups, even in a virtual machine.
    Bar("null-1ms-randread-4k-1", "slow disk, depth 1: CPU against --poll off", "cpu.server",
        FATHOM_NO_POLL, 1.15, 1.0),
    Bar("null-1ms-randread-4k-32", "slow disk, depth 32: CPU against --poll off",
        "cpu.server", FATHOM_NO_POLL, 1.15, 1.0),
    Bar("shm-randread-4k-32", "/dev/shm, depth 32: IOPS against QSD", "iops", QSD, 2.5, 3),
    # Where SPDK is given. It polls at all times: for a disk, some more IOPS for twice the CPU time.
    Bar("null-randread-4k-128", "null, depth 128: IOPS against SPDK", "iops", SPDK, 1.0, 1.5),
    Bar("null-randread-4k-1-poll", "null, depth 1, polling: p50 against SPDK", "latency.p50",
        SPDK, 1.15, 1.0),
    Bar("disk-randread-4k-32", "disk, depth 32: IOPS against SPDK", "iops", SPDK, 0.80, 0.95),
    Bar("disk-randread-4k-32", "disk, depth 32: CPU against SPDK", "cpu.server", SPDK, 0.6, 0.45),
    Bar("shm-randread-4k-32", "/dev/shm, depth 32: IOPS against SPDK", "iops", SPDK, 1.0, 1.2),
    Bar("nbd-randread-4k-32", "NBD, depth 32: IOPS against nbdkit", "iops", NBDKIT, 1.6, 2.5),
    Bar("nbd-randread-4k-32", "NBD, depth 32: IOPS against qemu-nbd", "iops", QEMU_NBD, 2.5, 4),
    Bar("nbd-randread-4k-1", "NBD, depth 1: p50 against nbdkit", "latency.p50", NBDKIT, 1.0, 0.7),
    Bar("nbd-fio-randread-4k-32", "NBD, fio at depth 32: CPU against nbdkit", "cpu.server",
        NBDKIT, 0.5, 0.35),
    Bar("nbd-fio-randread-4k-32", "NBD, fio at depth 32: CPU against the least possible",
        "cpu.server", NBD_FLOOR, 1.6, 1.3),
    Bar("img-convert", "img convert, raw to qcow2: time against qemu-img", "time", QEMU_IMG,
        0.8, 0.5),
    Bar("img-convert-compressed", "img convert -c, raw to qcow2: time against qemu-img",
        "time", QEMU_IMG, 0.9, 0.6),
    Bar("img-compare", "img compare, raw and qcow2: time against qemu-img", "time", QEMU_IMG,
        0.8, 0.5),
    Bar("nbd-nbdcopy", "NBD, nbdcopy: MB/s against nbdkit", "throughput", NBDKIT, 1.1, 1.5),
] + [bar for image in ("qcow2", "qed") for bar in (
    Bar(f"disk-{image}-full-randread-4k-32", f"disk, {image}, depth 32: IOPS against raw", "iops",
        FATHOM_RAW, 0.95, 0.99),
    Bar(f"shm-{image}-full-randread-4k-32", f"/dev/shm, {image}, depth 32: IOPS against raw",
        "iops", FATHOM_RAW, 0.90, 0.97),
    Bar(f"shm-{image}-full-randread-4k-32", f"/dev/shm, {image}, depth 32: IOPS against QSD",
        "iops", QSD, 2.2, 2.8),
    Bar(f"disk-{image}-empty-randwrite-4k-32", f"disk, {image}, allocating: IOPS against QSD",
        "iops", QSD, 1.5, 3),
    # The server's CPU is the limit; IOPS tell as well whom else its CPU had to serve.
    Bar(f"shm-{image}-backed-randwrite-4k-8",
        f"/dev/shm, {image}, copy on write: CPU against QSD", "cpu.server", QSD, 0.77, 0.5),
    # Each request reads and writes a cluster, so that a disk's bandwidth is the limit.
    Bar(f"disk-{image}-backed-randwrite-4k-8",
        f"disk, {image}, copy on write: IOPS against the host's pairs of 64k", "iops", HOST,
        0.90, 0.95),
)] + [bar for image in ENCRYPTED for rw in ("randread", "randwrite") for bar in (
    Bar(f"disk-{image}-full-{rw}-4k-32", f"disk, {image}, {rw}, depth 32: IOPS against raw", "iops",
        FATHOM_RAW, 0.85, 0.95),
    Bar(f"shm-{image}-full-{rw}-4k-32", f"/dev/shm, {image}, {rw}, depth 32: IOPS against QSD",
        "iops", QSD, 1.5, 2),
)]


def all_cases() -> list[Case]:
    cases = [Case("null", "randread", "4k", 1, "poll")]
    for storage in ("null", "disk", "shm"):
        for rw, bs in (("randread", "4k"), ("randwrite", "4k"), ("read", "256k")):
            cases += [Case(storage, rw, bs, depth) for depth in (1, 32, 128)]
    cases += [Case("null", "randread", "4k", depth, delay="1ms") for depth in (1, 32)]
    cases += [
        Case("nbd", "randread", "4k", 1),
        Case("nbd", "randread", "4k", 32),
        Case("nbd", "randread", "4k", 32, connections=4),
        Case("nbd", "randwrite", "4k", 32),
        Case("nbd", "read", "256k", 16),
        Case("nbd", "randread", "4k", 32, by="fio"),
        Case("nbd", "read", "256k", 64, by="nbdcopy"),
    ]
    for image in ("qcow2", "qed"):
        for storage in ("disk", "shm"):
            cases += [
                Case(storage, "randread", "4k", 32, image=image),
                Case(storage, "randwrite", "4k", 32, image=image, state="empty"),
                Case(storage, "randwrite", "4k", 8, image=image, state="backed"),
            ]
    for image in ENCRYPTED:
        for storage in ("disk", "shm"):
            cases += [
                Case(storage, "randread", "4k", 32, image=image),
                Case(storage, "randwrite", "4k", 32, image=image),
                Case(storage, "read", "256k", 8, image=image),
                Case(storage, "write", "256k", 8, image=image),
            ]
    cases += [Case("img", rw) for rw in ("convert", "convert-compressed", "compare")]
    return cases
