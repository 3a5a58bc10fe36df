"""Images for the cases that are not about raw disks."""

from pathlib import Path

from cases import Case
from process import run

# What copying of a whole raw disk (subjects.FILE_SIZE) may take, in bytes: its clusters and tables.
COPIED = 1152 << 20

# A disk that random writes do not fill within a measurement, in clusters of 64 KiB.
EMPTY_SIZE = "64G"

LIMIT = 900  # seconds

# Of encrypted images: what is measured is not how long it takes to unlock them.
KEY = "bench"
SECRET = ["--object", f"secret,id=s,data={KEY}"]
MADE_SO = {"luks": "key-secret=s,iter-time=10",
           "encrypted": "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"}
OPENED_SO = {"luks": ",key-secret=s", "encrypted": ",encrypt.format=luks,encrypt.key-secret=s"}


def path(case: Case, raw: Path) -> Path:
    """Where the case's image is; `raw` is the full raw image beside it."""
    return raw if case.image == "raw" else raw.with_suffix(f".{case.state}.{case.image}")


def make(case: Case, raw: Path) -> None:
    """Makes the case's image anew, unless it is one that stays as it is."""
    image = path(case, raw)
    if case.image == "raw" or case.state == "full" and image.exists():
        return
    image.unlink(missing_ok=True)
    if case.state == "full":
        encrypts = [*SECRET, "-o", MADE_SO[case.image]] if case.is_encrypted else []
        qemu_img("convert", *encrypts, "-f", "raw", "-O", case.format, raw, image)
    elif case.state == "backed":
        qemu_img("create", "-f", case.image, "-b", raw.name, "-F", "raw", image)
        if case.copies_in_memory:
            allocate(image)
    else:
        qemu_img("create", "-f", case.image, image, EMPTY_SIZE)
    run(["sync", "-d", image], LIMIT)


def qemu_img(command: str, *arguments) -> None:
    run(["qemu-img", command, "-q", *arguments], LIMIT)


def remove(raw: Path) -> None:
    for image in raw.parent.glob(f"{raw.stem}.*"):
        image.unlink(missing_ok=True)


def blockdevs(case: Case, image: Path, direct: str) -> list[str]:
    """QEMU's nodes, the last of them named n."""
    file = f"driver=file,filename={image},aio=io_uring,cache.direct={direct},discard=unmap"
    if case.image == "raw":
        return ["--blockdev", f"{file},node-name=n"]
    # The backing file's options are inherited from the image's.
    key = OPENED_SO.get(case.image, "")
    format_node = f"driver={case.format},file=f,cache.direct={direct},discard=unmap,node-name=n{key}"
    return [*(SECRET if key else []), "--blockdev", f"{file},node-name=f", "--blockdev", format_node]


def allocate(image: Path) -> None:
    """Memory for what will be written: finding it takes ten times as long as copying to it, or
    as long, as the machine pleases."""
    run(["fallocate", "--keep-size", "--length", COPIED, image], LIMIT)
