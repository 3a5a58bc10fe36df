"""Starts servers, sends them load, and asks fio for the host's own figure."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import images
import img
import nbd
from cases import FATHOM, FATHOM_RAW, HOST, QSD, Case
from noise import Noise, process_seconds
from result import Failed, Result

NULL_SIZE = 1 << 40
FILE_SIZE = 1 << 30
# Writes, of 4 KiB each, to a new image of clusters of 64 KiB on a file of that size: most of them
# copy a cluster.
COPIES = 8192
# Of which the best counts.
COPY_RUNS = 3
START_LIMIT = 20  # seconds


@dataclass
class Bench:
    """Where things are and how long a measurement lasts."""

    fathom: Path
    disk_dir: Path
    run_dir: Path
    server_cpu: int
    load_cpu: int
    seconds: float
    img: img.Images

    def path(self, storage: str) -> Path:
        if storage == "shm":
            return Path(f"/dev/shm/fathom-bench-{os.getpid()}.img")
        return self.disk_dir / f"fathom-bench-{os.getpid()}.img"

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

    def measure(self, case: Case, subject: str) -> Result:
        if case.storage == "img":
            return img.measure(case, subject, self.img, self.fathom)
        if case.copies_in_memory:
            # As short as a run is, whatever else happens can only make it look dearer.
            runs = [self._measure(case, subject) for _ in range(COPY_RUNS)]
            return min(runs, key=lambda result: result.server_cpu_us)
        return self._measure(case, subject)

    def _measure(self, case: Case, subject: str) -> Result:
        cpus = {self.server_cpu, self.load_cpu}
        if case.storage == "nbd":
            return self._nbd(case, subject, cpus)
        if subject == HOST:
            noise = Noise(cpus, None)
            result = self._fio(case)
            result.others_percent = noise.percent()
            return result
        if subject == FATHOM_RAW:
            case, subject = replace(case, image="raw"), FATHOM
        if case.storage != "null":
            images.make(case, self.path(case.storage))
        socket = self.run_dir / "disk.sock"
        command = self._qsd(case, socket) if subject == QSD else self._fathom(case, socket, subject)
        with running(command, socket, self.run_dir / "server.log") as server:
            noise = Noise(cpus, server)
            result = self._load(case, ["--vhost-user", str(socket)])
            result.others_percent = noise.percent()
            return result

    def _fathom(self, case: Case, socket: Path, subject: str) -> list[str]:
        disk = f"null:{NULL_SIZE}" if case.storage == "null" else str(self.image(case))
        options = subject.removeprefix(FATHOM).split()
        if case.image != "raw":
            options += ["--format", case.image]
        if case.delay:
            options += ["--filter", f"delay:read={case.delay}"]
        control = ["--control", str(self.run_dir / "control.sock")]
        return pinned(self.server_cpu, str(self.fathom), "serve", disk,
                      "--vhost-user", str(socket), *control, *options)

    def _qsd(self, case: Case, socket: Path) -> list[str]:
        if case.storage == "null":
            blockdev = f"driver=null-co,size={NULL_SIZE},read-zeroes=off"
            blockdevs = ["--blockdev", f"{blockdev},node-name=n"]
        else:
            direct = "on" if case.storage == "disk" else "off"
            blockdevs = images.blockdevs(case, self.image(case), direct)
        export = ("type=vhost-user-blk,id=e,node-name=n,num-queues=1,writable=on,"
                  f"addr.type=unix,addr.path={socket}")
        return pinned(self.server_cpu, "qemu-storage-daemon",
                      *blockdevs, "--export", export)

    def _nbd(self, case: Case, subject: str, cpus: set[int]) -> Result:
        socket = self.run_dir / "disk.sock"
        uri = f"nbd+unix:///?socket={socket}"
        command = nbd.server(case, subject, socket, self.fathom, self.path("shm"))
        command = pinned(self.server_cpu, *command)
        with running(command, socket, self.run_dir / "server.log") as server:
            if not nbd.is_full(subject):
                run(pinned(self.load_cpu, str(self.fathom), *nbd.fill(case, uri)), 60)
            noise = Noise(cpus, server)
            if case.by == "bench":
                result = self._load(case, ["--nbd", uri])
            else:
                before, start = process_seconds(server), time.monotonic()
                out = run(pinned(self.load_cpu, *nbd.load(case, uri, self.seconds)), self.seconds)
                seconds = time.monotonic() - start
                result = nbd.result(case, out, seconds, process_seconds(server) - before)
            result.others_percent = noise.percent()
            return result

    def image(self, case: Case) -> Path:
        return images.path(case, self.path(case.storage))

    def _load(self, case: Case, target: list[str]) -> Result:
        # An image that is being filled is another one after a while: nothing is left out. In
        # memory, who is fast would soon have copied all of it, and then only be writing.
        ramp = "500ms" if case.state == "full" else "0s"
        end = ["--runtime", f"{self.seconds}s"]
        if case.copies_in_memory:
            end = ["--number-ios", str(COPIES)]
        out = run(pinned(
            self.load_cpu, str(self.fathom), "bench", *target, "--json",
            "--rw", case.rw, "--bs", case.bs, "--iodepth", str(case.depth),
            "--queues", str(case.connections),
            "--wait", case.wait, "--cpus", str(self.load_cpu),
            *end, "--ramp-time", ramp), self.seconds)
        report = json.loads(out)
        latency = report["operations"][0]["latency"]
        backend = report["backend"]
        return Result(
            iops=report["iops"], mb_per_s=report["mb_per_s"],
            p50_us=latency["p50_ns"] / 1e3, p99_us=latency["p99_ns"] / 1e3,
            load_cpu_us=report["client_cpu_us_per_request"],
            server_cpu_us=backend and backend["cpu_us_per_request"])

    def _fio(self, case: Case) -> Result:
        """fio at its best: at depth 1 a plain pread or pwrite, else io_uring
        with everything registered. The page cache is /dev/shm's own storage."""
        direct = int(case.storage == "disk")
        engine = ["--ioengine=psync"]
        if case.depth > 1:
            engine = ["--ioengine=io_uring", "--fixedbufs", "--registerfiles",
                      f"--iodepth={case.depth}"]
        rw, bs = case.rw, case.bs
        if case.state == "backed":
            # What a copy on write asks of the disk: a cluster read for each one written.
            rw, bs = "randrw", "64k"
        out = run(pinned(
            self.load_cpu, "fio", "--name=host", f"--filename={self.path(case.storage)}",
            f"--rw={rw}", f"--bs={bs}", f"--direct={direct}", "--norandommap",
            "--time_based", f"--runtime={self.seconds}s", "--ramp_time=500ms", "--thread",
            "--output-format=json", *engine), self.seconds)
        job = json.loads(out[out.index("{"):])["jobs"][0]
        side = job["write" if "write" in case.rw else "read"]
        percentile = side["clat_ns"]["percentile"]
        busy = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Result(
            iops=side["iops"], mb_per_s=side["bw_bytes"] / 1e6,
            p50_us=percentile["50.000000"] / 1e3, p99_us=percentile["99.000000"] / 1e3,
            load_cpu_us=busy / max(side["iops"], 1) * 1e6)


def pinned(cpu: int, *command: str) -> list[str]:
    return ["taskset", "-c", str(cpu), *command]


def run(command: list[str], seconds: float) -> str:
    """The command's output; a command that hangs is a failure."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    except subprocess.TimeoutExpired as e:
        raise Failed(f"{command[3]} did not end") from e
    if done.returncode != 0:
        raise Failed(last_line(done.stderr) or f"{command[3]} failed")
    return done.stdout


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def is_listening(socket: Path | str) -> bool:
    """By the kernel's table: connecting would be a front-end of its own."""
    accepting = 0x10000  # __SO_ACCEPTCON
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        next(table)
        for line in table:
            fields = line.split()
            if fields[-1] == str(socket) and int(fields[3], 16) & accepting:
                return True
    return False


@contextmanager
def running(command: list[str], socket: Path, log: Path):
    """A server for as long as the block lasts; gives its process id."""
    socket.unlink(missing_ok=True)
    with open(log, "w", encoding="utf-8") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        end = time.monotonic() + START_LIMIT
        while not is_listening(socket):
            if server.poll() is not None or time.monotonic() > end:
                raise Failed(f"{command[3]}: {last_line(log.read_text(encoding='utf-8'))}")
            time.sleep(0.01)
        yield server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
