#!/usr/bin/env python3
"""How Fathom scales with the CPUs of a machine, and with the number of disks.

It needs Fathom's program (`make static` makes one that runs on any Linux) and python3, and takes ten minutes.
Each case is a curve: what more queues, threads, connections or disks bring, the efficiency (the speed-up against the
one that would be best), and what has no time left. Loads are `fathom bench`, so they take CPUs of the same machine:
server and load are on CPUs of their own while there are enough, one of each core before the others of the cores. The
limiter of a curve's end is often the load, or that both share all CPUs.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import curve
import scrape
from api import Api
from curve import Point
from experiment import TARGET, progress
from process import Failed, run, running
from served import (Disk, Load, Setup, counts, listening, loading, memory_of, serving, until_all_run,
                    window)

NULL = "null:1T"
DEPTH = 32
# Of each of many disks.
SMALL_DEPTH = 8
# Seconds of a point besides what is measured: the start and the end of a server and its loads.
BESIDES = 2.5
# Seconds until the polling of the threads has settled.
SETTLE = 0.5
# How long each request takes while a server is replaced: its disks are busy, and the CPUs are not.
DELAY_MS = 10


@dataclass
class Sizes:
    """How much of everything: all of it, or as little as shows that it works."""

    cpus: int
    seconds: float
    disks: list[int]
    idle: list[int]
    upgraded: list[int]
    scraped: list[int]
    scrapes: int
    image: int  # bytes of a disk that has data
    churn_per_second: int = 10

    @property
    def steps(self) -> list[int]:
        return curve.steps(self.cpus)

    def points(self) -> int:
        """Of all cases together, by which time is distributed."""
        return (len(self.steps) * (4 + len(self.disks)) + len(self.idle) + 2 * len(self.upgraded)
                + len(self.scraped) + 2)


def sizes(minutes: float, is_short: bool, cpus: int) -> Sizes:
    if is_short:
        return Sizes(cpus, 0.3, [1, 3], [0, 10], [1, 2], [2, 5], 2, 16 << 20)
    all_of_it = Sizes(cpus, 5, [1, 8, 64], [0, 100, 1000], [1, 16, 64, 256], [10, 100, 1000], 20, 256 << 20)
    # Starting a thousand disks, and giving each something to tell, takes a minute.
    each = (minutes - 1) * 60 / all_of_it.points() - BESIDES
    all_of_it.seconds = min(all_of_it.seconds, max(0.5, each))
    return all_of_it


@dataclass
class Machine:
    """CPUs, in the order in which they are used."""

    order: list[int]

    @classmethod
    def this(cls) -> "Machine":
        allowed = sorted(os.sched_getaffinity(0))
        siblings = {cpu: cpus_of(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or [cpu]
                    for cpu in allowed}
        return cls(curve.by_cores(allowed, siblings))

    def split(self, server: int, load: int) -> tuple[dict, list]:
        """Keys of a disk or a pool, and options of a load, that keep both apart."""
        found = curve.split(self.order, server, load)
        if found is None:
            return {}, []
        on, off = (",".join(map(str, cpus)) for cpus in found)
        return {"cpus": on}, ["--cpus", off]


def cpus_of(file: str) -> list[int]:
    """A list such as 0,4-5; nothing where the kernel does not say."""
    try:
        text = Path(file).read_text(encoding="ascii").strip()
    except OSError:
        return []
    ranges = (part.split("-") for part in text.split(","))
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]


class Scale:
    """Runs the cases."""

    def __init__(self, fathom: Path, how: Sizes):
        self.fathom, self.how, self.machine = fathom, how, Machine.this()
        self.results: list[dict] = []

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Paths of sockets have to be short."""
        with tempfile.TemporaryDirectory(prefix="fathom-scale-", dir="/tmp") as name:
            yield Path(name)

    def bench(self, place: Path, name: str, target: list, queues: int, depth: int, more: list) -> Load:
        options = ["--rw", "randread", "--bs", "4k", "--iodepth", depth, "--queues", queues,
                   "--runtime", "1h", *more]
        return Load(self.fathom, place, f"load-{name}", target, options)

    def fill(self, target: list) -> None:
        """Writes all of a memory disk: holes would be read faster."""
        run([self.fathom, "bench", *target, "--rw", "write", "--bs", 1 << 20, "--iodepth", 4,
             "--number-ios", self.how.image >> 20], 120)

    def measure(self, setup: Setup, busy: list[Disk], start: Callable[[Path], list[Load]], threads: int,
                loaders: int, n: int, factor: float, beside: Callable[[Path], AbstractContextManager] = nullcontext,
                ) -> Point:
        """One point: a server, its loads, what else happens beside them, and what the loads do together."""
        with self.place() as place, serving(self.fathom, place, setup) as (pid, api):
            if busy[0].image.startswith("memory:"):
                self.fill(target(place, busy[0].name, setup.nbd))
            before = counts(api, busy)
            loads = start(place)
            with loading(loads), beside(place):
                until_all_run(api, busy, loads, before)
                time.sleep(min(SETTLE, self.how.seconds))
                seen = window(api, pid, busy, loads, self.how.seconds)
        return Point(n, seen.rate, seen.server, seen.load, seen.busy, threads, loaders, factor)

    def tell(self, title: str, table: str, found: object) -> None:
        progress("")
        print(f"\n{title}\n{table}", flush=True)
        self.results.append({"case": title, "points": found})

    def speed_up(self, title: str, what: str, points: Iterator[Point]) -> None:
        found = curve.rows(list(points), len(self.machine.order))
        self.tell(title, curve.aligned(curve.lines(what, found)), found)

    # Queues, and as many threads.

    def queues(self, image: str, name: str) -> None:
        self.speed_up(f"{name} disk: queues, on as many threads", "queues",
                      (self.queue_point(image, name, n) for n in self.how.steps))

    def queue_point(self, image: str, name: str, n: int) -> Point:
        progress(f"{name} disk: {n} queues")
        keys, options = self.machine.split(n, n)
        disk = Disk("disk", image, {"queues": n, "iothreads": n} | keys)

        def start(place: Path) -> list[Load]:
            return [self.bench(place, "0", target(place, "disk"), n, DEPTH, options)]
        return self.measure(Setup([disk]), [disk], start, n, n, n, n)

    def null(self) -> None:
        self.queues(NULL, "null")

    def memory(self) -> None:
        self.queues(f"memory:{self.how.image}", "memory")

    def tmpfs(self) -> None:
        with tempfile.NamedTemporaryFile(prefix="fathom-scale-", dir="/dev/shm") as file:
            # Holes would be read faster.
            for _ in range(self.how.image >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            self.queues(file.name, "tmpfs")

    def nbd(self) -> None:
        self.speed_up("memory disk over NBD: connections, on as many threads", "connections",
                      (self.connection_point(n) for n in self.how.steps))

    def connection_point(self, n: int) -> Point:
        progress(f"NBD: {n} connections")
        keys, options = self.machine.split(n, n)
        disk = Disk("disk", f"memory:{self.how.image}", {"iothreads": n} | keys)

        def start(place: Path) -> list[Load]:
            return [self.bench(place, "0", target(place, "disk", by_nbd=True), n, DEPTH, options)]
        return self.measure(Setup([disk], nbd=True), [disk], start, n, n, n, n)

    # Many disks.

    def disks(self) -> None:
        for many in self.how.disks:
            used = [n for n in self.how.steps if n == 1 or n <= many]
            self.speed_up(f"{many} null disks with a queue each: threads of their pool", "threads",
                          (self.pool_point(many, n) for n in used))

    def pool_point(self, many: int, threads: int) -> Point:
        progress(f"{many} disks on {threads} threads")
        keys, apart = self.machine.split(threads, max(1, self.how.cpus - threads))
        free = apart[1].split(",") if apart else []
        disks = [Disk(f"d{n}", NULL, {"pool": "p"}) for n in range(many)]

        def start(place: Path) -> list[Load]:
            return [self.bench(place, disk.name, target(place, disk.name), 1, SMALL_DEPTH,
                               ["--cpus", free[n % len(free)]] if free else []) for n, disk in enumerate(disks)]
        loaders = min(many, len(free) or self.how.cpus)
        return self.measure(Setup(disks, {"p": {"threads": threads} | keys}), disks, start, threads, loaders,
                            threads, threads)

    def idle(self) -> None:
        self.speed_up("a busy null disk in a server with idle disks", "idle disks",
                      (self.idle_point(many) for many in self.how.idle))
        self.idle_cost(max(self.how.idle))

    def idle_point(self, many: int) -> Point:
        progress(f"a busy disk and {many} idle disks")
        keys, options = self.machine.split(1, 1)
        busy = Disk("busy", NULL, keys)

        def start(place: Path) -> list[Load]:
            return [self.bench(place, "0", target(place, "busy"), 1, DEPTH, options)]
        return self.measure(Setup([busy, *idle_disks(many)], POOL), [busy], start, 1, 1, many, 1)

    def idle_cost(self, many: int) -> None:
        progress(f"{many} idle disks")
        found = []
        for disks in (1, many):
            begun = time.monotonic()
            with self.place() as place, serving(self.fathom, place, Setup(idle_disks(disks), POOL)) as (pid, api):
                took = time.monotonic() - begun
                # The workers of disks start after the server listens.
                time.sleep(4 * SETTLE)
                seen = window(api, pid, [], [], self.how.seconds)
                found.append({"disks": disks, "start_seconds": took, "cpu": seen.server, "memory": memory_of(pid)})
        one, all_of_them = found
        each = (all_of_them["memory"] - one["memory"]) / max(1, many - 1)
        self.tell(f"{many} idle disks", f"  start {all_of_them['start_seconds']:.2f} s, "
                  f"{all_of_them['cpu']:.1%} of a CPU, {each / 1024:.0f} KiB each", found)

    # Upgrades, scrapes and changes, while disks are in use.

    def upgrade(self) -> None:
        found = [self.upgrade_point(many) for many in self.how.upgraded]
        first = found[0]["held_ms"]
        table = [["disks", "upgrade s", "held ms", "efficiency", "longest wait ms", "worst", "without upgrade",
                  "limiter"]]
        for one in found:
            # At best all disks are handed over in the time of one.
            one["efficiency"] = first / one["held_ms"] if one["held_ms"] else 1.0
            each = one["held_ms"] / one["disks"] * 1e3
            # Requests in flight are waited for, however many disks there are.
            is_short = one["held_ms"] < 2 * DELAY_MS
            one["limiter"] = "requests in flight" if is_short else f"server: {each:.0f} us a disk"
            table.append([str(one["disks"]), f"{one['seconds']:.2f}", f"{one['held_ms']:.1f}",
                          f"{one['efficiency']:.0%}", f"{one['waits_ms']['median']:.1f}",
                          f"{one['waits_ms']['worst']:.1f}", f"{one['undisturbed_ms']['worst']:.1f}",
                          one["limiter"]])
        self.tell(f"upgrade of a server whose disks are all busy (each request takes {DELAY_MS} ms)",
                  curve.aligned(table), found)

    def upgrade_point(self, many: int) -> dict:
        disks = [Disk(f"d{n}", NULL, {"pool": "p", "filters": [f"delay:read={DELAY_MS}ms"]}) for n in range(many)]
        pools = {"p": {"threads": self.how.cpus}}
        with self.place() as place, serving(self.fathom, place, Setup(disks, pools)) as (pid, api):
            try:
                progress(f"{many} busy disks")
                quiet, _ = self.waits(place, api, disks, lambda: time.sleep(self.how.seconds))
                progress(f"upgrade of {many} busy disks")
                waits, replaced = self.waits(place, api, disks, lambda: replace(api))
            finally:
                # The successor is not this program's child.
                api.ask("POST", "/v1/server/quit")
                gone(place / "api", pid)
        return {"disks": many, "waits_ms": waits, "undisturbed_ms": quiet} | replaced

    def waits(self, place: Path, api: Api, disks: list[Disk],
              during: Callable[[], dict | None]) -> tuple[dict, dict | None]:
        """The longest latency of each disk, over a time in which something else is done."""
        before = counts(api, disks)
        # What a request waits while other loads start is not measured.
        ramp = 2 * SETTLE + len(disks) / 50
        loads = [self.bench(place, disk.name, target(place, disk.name), 1, 1, ["--ramp-time", f"{ramp}s"])
                 for disk in disks]
        with loading(loads):
            until_all_run(api, disks, loads, before)
            time.sleep(ramp)
            done = during()
            time.sleep(SETTLE)
            for load in loads:
                load.check()
            for load in loads:
                load.end(signal.SIGINT)
        longest = [load.report()["operations"][0]["latency"]["max_ns"] / 1e6 for load in loads]
        return {"median": median(longest), "worst": max(longest)}, done

    def scrape(self) -> None:
        found = [self.scrape_point(many) for many in self.how.scraped]
        first = found[0]["cpu_ms"] / found[0]["disks"]
        table = [["disks", "CPU ms", "ms", "efficiency", "kB", "limiter"]]
        for one in found:
            each = one["cpu_ms"] / one["disks"]
            is_busy = one["cpu_ms"] >= curve.BUSY * one["ms"]
            one |= {"efficiency": first / each if each else 1.0,
                    "limiter": "CPU of the server" if is_busy else "waiting: the page's way to its reader"}
            table.append([str(one["disks"]), f"{one['cpu_ms']:.2f}", f"{one['ms']:.2f}", f"{one['efficiency']:.0%}",
                          f"{one['bytes'] / 1e3:.0f}", one["limiter"]])
        self.tell("scrape of the metrics of all disks, as text", curve.aligned(table), found)

    def scrape_point(self, many: int) -> dict:
        progress(f"scrape of {many} disks")
        with self.place() as place:
            command = [self.fathom, "serve", "--config", scrape.config(place, many)]
            with running(command, place / "api", None) as pid:
                scrape.load(Namespace(fathom=self.fathom, disks=many), place)
                # CPU time is known in hundredths of a second.
                times = self.how.scrapes * max(1, 100 // many)
                begun = time.monotonic()
                cpu, page = scrape.scrape(Api(place / "api"), pid, scrape.FORMS["text"], times)
                took = (time.monotonic() - begun) / times
        return {"disks": many, "cpu_ms": cpu * 1e3, "ms": took * 1e3, "bytes": len(page)}

    def churn(self) -> None:
        rates = (0, self.how.churn_per_second)
        self.speed_up("a busy null disk while its server adds and removes disks", "disks/s",
                      (self.churn_point(rate) for rate in rates))

    def churn_point(self, rate: int) -> Point:
        progress(f"a busy disk while {rate} disks a second come and go")
        keys, options = self.machine.split(1, 1)
        busy = Disk("busy", NULL, keys)

        def start(place: Path) -> list[Load]:
            return [self.bench(place, "0", target(place, "busy"), 1, DEPTH, options)]

        def beside(place: Path) -> AbstractContextManager:
            return churning(self.fathom, place, rate) if rate else nullcontext()
        return self.measure(Setup([busy]), [busy], start, 1, 1, rate, 1, beside)


# Of the disks that do nothing.
POOL = {"p": {"threads": 1}}


def idle_disks(many: int) -> list[Disk]:
    return [Disk(f"d{n}", NULL, {"pool": "p"}) for n in range(many)]


def target(place: Path, disk: str, by_nbd: bool = False) -> list:
    """How `fathom bench` reaches a disk."""
    return ["--nbd", f"nbd+unix:///{disk}?socket={place / 'nbd'}"] if by_nbd else ["--vhost-user", place / disk]


def replace(api: Api) -> dict:
    """Has the server start a process of the same program, which takes over."""
    begun = time.monotonic()
    answer = api.ask("POST", "/v1/server/upgrade", {"binary": None, "disconnect": False})
    # The successor has the socket now.
    api.close()
    return {"seconds": time.monotonic() - begun, "held_ms": answer["pause_ms"]}


def gone(socket: Path, pid: int) -> None:
    """Waits until the server of the socket has ended, which began as process `pid`."""
    end = time.monotonic() + 60
    while str(socket) in listening():
        if time.monotonic() > end:
            raise Failed(f"the server that was process {pid} does not end")
        time.sleep(0.02)


@contextmanager
def churning(fathom: Path, place: Path, rate: int):
    """Adds and removes a disk in an image, `rate` times a second, as long as the block lasts."""
    image, end, failed = place / "churn.qcow2", threading.Event(), []
    run([fathom, "img", "create", "-q", "-f", "qcow2", image, "1G"], 60)
    disk = {"image": str(image), "format": "qcow2", "vhost-user": str(place / "churn")}

    def churn() -> None:
        api, due = Api(place / "api"), time.monotonic()
        try:
            while not end.wait(max(0.0, due - time.monotonic())):
                api.ask("PUT", "/v1/disks/churn", disk)
                api.ask("DELETE", "/v1/disks/churn")
                due += 1 / rate
        except (Failed, OSError) as e:
            failed.append(e)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if failed:
        raise Failed(f"disks cannot come and go: {failed[0]}")


CASES = ["null", "memory", "tmpfs", "nbd", "disks", "idle", "upgrade", "scrape", "churn"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom",
                        help="the program, default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10, help="of the whole run, default: %(default)s")
    parser.add_argument("--cpus", type=int, metavar="N", default=len(os.sched_getaffinity(0)),
                        help="most queues, threads and connections; default: %(default)s, the CPUs of this machine")
    parser.add_argument("--only", choices=CASES, nargs="+", default=CASES, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, too")
    parser.add_argument("--short", action="store_true",
                        help="as little of each case as shows that it works; the figures mean nothing")
    args = parser.parse_args()
    args.fathom = args.fathom.resolve()
    if not args.fathom.is_file():
        parser.error(f"{args.fathom} is not built: run `make build`, or name a program with --fathom")
    if args.cpus < 1:
        parser.error("--cpus: at least 1")
    return args


def described(fathom: Path) -> dict:
    """The machine, in general terms, and the program."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
        models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {"program": run([fathom, "--version"], 20).strip(), "cpus": len(os.sched_getaffinity(0)),
            "model": models[0] if models else platform.machine(), "kernel": platform.release(),
            "date": time.strftime("%Y-%m-%d", time.gmtime())}


def main() -> None:
    args = parse()
    # Servers and loads end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    about = described(args.fathom)
    print(f"{about['program']}, {about['cpus']} CPUs ({about['model']}), Linux {about['kernel']}, {about['date']}")
    if os.getloadavg()[0] > 0.5 and not args.short:
        print("warning: other programs are running; the figures will be off", file=sys.stderr)
    scale = Scale(args.fathom, sizes(args.minutes, args.short, args.cpus))
    try:
        for case in args.only:
            getattr(scale, case)()
    finally:
        if args.json:
            args.json.write_text(json.dumps(about | {"cases": scale.results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (Failed, OSError, subprocess.SubprocessError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
