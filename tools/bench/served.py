"""Servers that need nothing but Fathom's program, and what they and their loads do in a window of time."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from api import Api
from noise import busy_seconds, process_seconds
from process import Failed, last_line, running

# Seconds after which a disk that has had no request is taken for stuck.
STUCK = 60


@dataclass
class Disk:
    """A disk of a configuration, by its keys besides name, image and sockets."""

    name: str
    image: str
    keys: dict[str, str | int | list[str]] = field(default_factory=dict)


def value(one: str | int | list[str]) -> str:
    """As TOML has it."""
    if isinstance(one, list):
        return f"[{', '.join(map(value, one))}]"
    return str(one) if isinstance(one, int) else f"'{one}'"


@dataclass
class Setup:
    """What a server serves: each disk to virtual machines at `NAME`, and with `nbd` all of them to clients at `nbd`.
    (A disk that has such clients takes parts of blocks, which costs something.)"""

    disks: list[Disk]
    pools: dict[str, dict] = field(default_factory=dict)
    nbd: bool = False


def configuration(place: Path, setup: Setup) -> str:
    text = [f"api = {{ socket = '{place / 'api'}' }}"]
    if setup.nbd:
        text += ["[nbd]", f"listen = ['unix:{place / 'nbd'}']"]
    for name, keys in setup.pools.items():
        text += [f"[pool.{name}]", *(f"{key} = {value(one)}" for key, one in keys.items())]
    for disk in setup.disks:
        keys = {"name": disk.name, "image": disk.image, "vhost-user": str(place / disk.name)} | disk.keys
        text += ["[[disk]]", *(f"{key} = {value(one)}" for key, one in keys.items())]
    return "\n".join(text) + "\n"


def listening() -> set[str]:
    """Paths of the sockets that accept connections."""
    accepting = 0x10000  # __SO_ACCEPTCON
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        next(table)
        found = [line.split() for line in table]
    return {fields[7] for fields in found if len(fields) == 8 and int(fields[3], 16) & accepting}


@contextmanager
def serving(fathom: Path, place: Path, setup: Setup):
    """A server for as long as the block lasts; gives its process id and its API."""
    file = place / "conf"
    file.write_text(configuration(place, setup), encoding="utf-8")
    with running([fathom, "serve", "--config", file], place / "api", None) as pid:
        wanted, end = {str(place / disk.name) for disk in setup.disks}, time.monotonic() + STUCK
        while not wanted <= listening():
            if time.monotonic() > end:
                raise Failed("the server does not serve all disks")
            time.sleep(0.01)
        api = Api(place / "api")
        try:
            yield pid, api
        finally:
            api.close()


class Load:
    """`fathom bench`, until it is ended."""

    def __init__(self, fathom: Path, place: Path, name: str, target: list, options: list):
        self.result, self.errors = place / f"{name}.json", place / f"{name}.err"
        command = [fathom, "bench", *target, *options, "--json"]
        with open(self.result, "wb") as out, open(self.errors, "wb") as err:
            self.process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=err)

    def check(self) -> None:
        """A load that has ended by itself is a failure."""
        if self.process.poll() is not None:
            raise Failed(f"a load has ended: {last_line(self.errors.read_text(encoding='utf-8'))}")

    def report(self) -> dict:
        """What it has measured, after its end."""
        try:
            return json.loads(self.result.read_text(encoding="utf-8"))
        except ValueError as e:
            raise Failed(f"a load has no result: {last_line(self.errors.read_text(encoding='utf-8'))}") from e

    def end(self, with_signal: int = signal.SIGKILL) -> None:
        self.process.send_signal(with_signal)
        try:
            self.process.wait(STUCK)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def loading(loads: list[Load]):
    """They run for as long as the block lasts."""
    try:
        yield
    finally:
        for load in loads:
            load.end()


def counts(api: Api, disks: list[Disk]) -> list[int]:
    """The requests that each disk has had."""
    states = (api.ask("GET", f"/v1/disks/{disk.name}")["state"] for disk in disks)
    return [sum(worker["requests"] for worker in state["workers"]) for state in states]


def until_all_run(api: Api, disks: list[Disk], loads: list[Load], before: list[int]) -> None:
    """Waits until each disk has had requests since `before`."""
    end = time.monotonic() + STUCK
    while any(now <= then for now, then in zip(counts(api, disks), before)):
        for load in loads:
            load.check()
        if time.monotonic() > end:
            raise Failed("a disk has had no request")
        time.sleep(0.02)


@dataclass(frozen=True)
class Window:
    """What happened between two instants, per second."""

    rate: float
    server: float
    load: float
    busy: float


def window(api: Api, server: int, disks: list[Disk], loads: list[Load], seconds: float) -> Window:
    """Measures while all loads run."""
    def sample() -> tuple[float, ...]:
        requests = sum(counts(api, disks))
        return (time.monotonic(), requests, process_seconds(server),
                sum(process_seconds(load.process.pid) for load in loads), busy_seconds(os.sched_getaffinity(0)))
    before = sample()
    time.sleep(seconds)
    after = sample()
    for load in loads:
        load.check()
    elapsed, *amounts = (late - early for early, late in zip(before, after))
    return Window(*(amount / elapsed for amount in amounts))


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) * 1024 if found else 0
