#!/usr/bin/env python3
"""A machine whose image is far away: how long it takes to its login, and what the cache costs.

A Debian system boots in QEMU from a qcow2 disk above an image in a file (`local`), and above the same image on an
NBD server that answers each read after a delay: nothing of it cached (`cold`), likewise but with what boots read
first known (`profile`), and all cached (`warm`). Rounds are interleaved. Then `fathom bench` reads at random from a
file and from a warm cache, by turns. Needs root, debootstrap and this machine's kernel.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import loads
from experiment import TARGET
from noise import observed
from process import running
from subjects import choose_cpus

BARS = {"cold": 3.0, "profile": 1.5}
WARM = 0.95
SUITE = "bookworm"
PACKAGES = "systemd-sysv,udev,dbus,openssh-server,python3-minimal"
SIZE = "4G"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--delay", type=float, default=10, help="in milliseconds, default: 10")
    parser.add_argument("--seconds", type=float, default=3, help="of random reads, default: 3")
    parser.add_argument("--image", type=Path, default=TARGET / "bench-base.raw",
                        help="made if it is not there; default: %(default)s")
    parser.add_argument("--accel", default="tcg", help="QEMU's accelerator, default: %(default)s")
    parser.add_argument("--server-cpu", type=int, help="default: as make bench's")
    parser.add_argument("--load-cpu", type=int, help="default: as make bench's")
    return parser.parse_args()


def make_image(image: Path) -> None:
    """A small Debian with an empty password for root, as a file system without partitions."""
    if image.exists():
        return
    with tempfile.TemporaryDirectory(dir=image.parent) as place:
        root = Path(place, "root")
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, root],
                       check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["chroot", root, "passwd", "-d", "root"], check=True,
                       stdout=subprocess.DEVNULL)
        (root / "etc" / "hostname").write_text("guest\n", "utf-8")
        new = image.with_suffix(".new")
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", root, new, SIZE], check=True)
        new.rename(image)


def kernel() -> tuple[Path, Path]:
    """This machine's newest, with the modules that it needs to find a disk."""
    images = sorted(Path("/boot").glob("vmlinuz-*"))
    for image in reversed(images):
        initrd = image.with_name(image.name.replace("vmlinuz-", "initrd.img-"))
        if initrd.exists():
            return image, initrd
    sys.exit("base.py: no kernel with an initrd in /boot")


def boot(place: Path, disk: Path, accel: str) -> float:
    """Seconds until a login is possible."""
    image, initrd = kernel()
    command = ["qemu-system-x86_64", "-machine", f"q35,accel={accel}", "-m", "512M", "-nographic",
               "-no-reboot", "-kernel", image, "-initrd", initrd, "-append",
               "root=/dev/vda rw console=ttyS0 quiet systemd.mask=systemd-networkd-wait-online",
               "-object", "memory-backend-memfd,id=mem,size=512M,share=on", "-numa", "node,memdev=mem",
               "-chardev", f"socket,id=disk,path={disk}",
               "-device", "vhost-user-blk-pci,chardev=disk", "-net", "none"]
    start = time.monotonic()
    console = place / "console"
    with open(console, "wb") as out:
        guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            while b"login:" not in console.read_bytes():
                if guest.poll() is not None or time.monotonic() - start > 900:
                    sys.exit(f"base.py: the guest does not boot:\n{console.read_text('utf-8')}")
                time.sleep(0.02)
            return time.monotonic() - start
        finally:
            guest.kill()
            guest.wait()


class Host:
    """Where the disks and the caches are."""

    def __init__(self, args: argparse.Namespace, place: Path):
        self.args, self.place = args, place
        self.socket, self.origin = place / "disk", place / "origin"
        self.remote = f"nbd+unix:///?socket={self.origin}"

    def fathom(self, *args) -> str:
        return subprocess.run([self.args.fathom, *map(str, args)], check=True,
                              stdout=subprocess.PIPE, encoding="utf-8").stdout

    def overlay(self, base: str) -> Path:
        disk = self.place / "disk.qcow2"
        self.fathom("img", "create", "-q", "-u", "-f", "qcow2", "-b", base, "-F", "raw", disk, SIZE)
        return disk

    def serve(self, base: str, *more) -> list:
        return [self.args.fathom, "serve", self.overlay(base), "--format", "qcow2", "--vhost-user",
                self.socket, "--api", self.place / "control", *more]

    def cached(self, cache: Path, *more) -> list:
        return self.serve(self.remote, "--base", self.remote, "--base-cache", cache, *more)

    def far(self, image: Path) -> list:
        return [self.args.fathom, "serve", image, "--readonly", "--nbd",
                f"unix:{self.origin}", "--api", self.place / "origin-api",
                "--filter", f"delay:read={self.args.delay}ms"]

    def boot(self, command: list, cpu: int) -> float:
        with running(command, self.socket, cpu):
            return boot(self.place, self.socket, self.args.accel)


def forget(path: Path) -> None:
    """The kernel's copy of a file, so that all read it alike."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def boots(args: argparse.Namespace, place: Path, cpus: tuple[int, int]) -> bool:
    host, (cpu, far_cpu) = Host(args, place), cpus
    warm, profile = place / "warm", place / "profile"
    times: dict[str, list[float]] = {"local": [], "warm": [], "cold": [], "profile": []}
    with running(host.far(args.image), host.origin, far_cpu):
        host.boot(host.cached(warm), cpu)
        # It is noted when the disk is let go of.
        for _ in range(100):
            time.sleep(0.1)
            noted = subprocess.run([args.fathom, "base", "profile", host.remote, "--base-cache", warm],
                                   check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if noted.returncode == 0:
                break
        profile.write_bytes(noted.stdout)
        for turn in range(args.rounds):
            order = list(times)
            for what in order[turn % 4:] + order[:turn % 4]:
                forget(args.image)
                if what == "local":
                    command = host.serve(str(args.image.resolve()))
                    command += ["--allow-dir", args.image.resolve().parent]
                elif what == "warm":
                    command = host.cached(warm)
                else:
                    cold = Path(tempfile.mkdtemp(dir=place))
                    more = ["--base-profile", profile] if what == "profile" else []
                    command = host.cached(cold, *more)
                times[what].append(host.boot(command, cpu))
                if what in BARS:
                    shutil.rmtree(cold, ignore_errors=True)
            print(f"round {turn + 1}: " + ", ".join(f"{what} {all[-1]:.1f} s"
                                                     for what, all in times.items()), flush=True)
    runs = profile.read_text("utf-8").splitlines()
    read = sum(int(re.split(r"\s", run)[1]) for run in runs)
    print(f"a boot reads {read >> 20} MiB")
    kept = True
    for what in ("warm", "profile", "cold"):
        ratio = median(a / b for a, b in zip(times[what], times["local"]))
        bar = BARS.get(what)
        verdict = "" if bar is None else f" (at most {bar}: {'yes' if ratio <= bar else 'NO'})"
        kept &= bar is None or ratio <= bar
        print(f"time to login, {what} : local = {ratio:.2f}{verdict}")
    return kept


def reads(args: argparse.Namespace, place: Path, cpus: tuple[int, int]) -> bool:
    host, (server_cpu, load_cpu) = Host(args, place), cpus
    cache, image = place / "cache", place / "noise"
    # Holes would be served without the disk.
    with open("/dev/urandom", "rb") as noise, open(image, "wb") as out:
        for _ in range(1024):
            out.write(noise.read(1 << 20))
    found: dict[str, list[float]] = {"file": [], "cache": []}
    load = ["--rw", "randread", "--bs", "4k", "--iodepth", "32", "--runtime", f"{args.seconds}s",
            "--ramp-time", "500ms", "--size", "1G"]
    with running(host.far(image), host.origin, load_cpu):
        def measure(command: list) -> float:
            with running(command, host.socket, server_cpu) as server:
                seen = observed(lambda: loads.bench(load_cpu, args.fathom, args.seconds, "--vhost-user",
                                                    host.socket, *load)[1], set(cpus), server)
                return seen["iops"]["value"]

        local = [args.fathom, "serve", image, "--readonly", "--vhost-user", host.socket,
                 "--api", place / "control"]
        cached = [args.fathom, "serve", f"cached:{host.remote}", "--readonly", "--vhost-user",
                  host.socket, "--api", place / "control", "--base-cache", cache,
                  "--base-fetch", "8G"]
        with running(cached, host.socket, server_cpu):
            fill = ["--rw", "read", "--bs", "1M", "--iodepth", "8"]
            subprocess.run([args.fathom, "bench", "--vhost-user", host.socket, *fill, "--number-ios",
                            "1024"], check=True, stdout=subprocess.DEVNULL)
        for turn in range(args.rounds):
            for what in list(found)[::1 if turn % 2 else -1]:
                found[what].append(measure(local if what == "file" else cached))
    ratio = median(a / b for a, b in zip(found["cache"], found["file"]))
    print(f"random reads of 4 KiB, depth 32, warm cache : file = {ratio:.3f} "
          f"(at least {WARM}: {'yes' if ratio >= WARM else 'NO'})")
    return ratio >= WARM


def main() -> int:
    args = parse()
    cpus = choose_cpus(args)
    make_image(args.image)
    # Direct I/O must work there, and paths of sockets be short.
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/var/tmp") as name:
        place = Path(name)
        kept = reads(args, place, cpus)
        kept &= boots(args, place, cpus)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
