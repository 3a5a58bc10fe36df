#!/usr/bin/env python3
"""What it costs a server to tell the metrics of many disks.

Each disk holds nothing, shares a pool's thread and has had some reads, writes and flushes. A scrape is the
CPU time of the server, in each form; the ratio is to what `cat` takes to send the same page from a file
through a socket.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from api import Api
from experiment import TARGET
from noise import process_seconds
from process import Failed, run, running

FORMS = {
    "text": "text/plain",
    "OpenMetrics": "application/openmetrics-text",
    "protobuf": "application/vnd.google.protobuf",
}
# For 1,000 disks, in seconds.
BAR = 0.1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--disks", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--scrapes", type=int, default=10,
                        help="of each form in each round, default: %(default)s: a process's CPU "
                             "time is known in hundredths of a second")
    return parser.parse_args()


def config(place: Path, disks: int) -> Path:
    tables = [f"[[disk]]\nname = 'd{number}'\nimage = 'null:1G'\npool = 'p'\n"
              for number in range(disks)]
    head = f"api = {{ socket = '{place / 'api'}' }}\n[nbd]\nlisten = ['unix:{place / 'nbd'}']\n"
    file = place / "conf"
    file.write_text(f"{head}[pool.p]\nthreads = 1\n{''.join(tables)}", encoding="utf-8")
    return file


def load(args: argparse.Namespace, place: Path) -> None:
    """Each disk gets something to tell."""
    def one(number: int) -> None:
        uri = f"nbd+unix:///d{number}?socket={place / 'nbd'}"
        run([args.fathom, "bench", "--nbd", uri, "--rw", "randrw", "--iodepth", "1",
             "--number-ios", "32", "--fsync", "4"], 20)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, range(args.disks)))


def scrape(api: Api, server: int, accept: str, times: int) -> tuple[float, bytes]:
    """The server's CPU time for one page, and the page."""
    used = -process_seconds(server)
    for _ in range(times):
        api.request("GET", "/metrics", headers={"Accept": accept})
        answer = api.getresponse()
        page = answer.read()
        if answer.status != 200:
            raise Failed(f"/metrics: {page.decode()}")
    return (used + process_seconds(server)) / times, page


def cat(file: Path) -> float:
    """The CPU time of sending it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = subprocess.Popen(["cat", file], stdout=theirs)
        theirs.close()
        while ours.recv(1 << 20):
            pass
        _, status, usage = os.wait4(sender.pid, 0)
        sender.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def told(form: str, size: int, scrapes: list[float], cats: list[float]) -> str:
    """Medians over the rounds; ratios are of what was measured in the same one."""
    ratio = median(one / other for one, other in zip(scrapes, cats))
    return (f"{form}: {median(scrapes) * 1e3:.0f} ms for {size / 1e6:.1f} MB "
            f"({min(scrapes) * 1e3:.0f} to {max(scrapes) * 1e3:.0f}), {ratio:.1f} times cat")


def measure(args: argparse.Namespace, place: Path) -> None:
    command = [args.fathom, "serve", "--config", config(place, args.disks)]
    with running(command, place / "api", None) as server:
        load(args, place)
        api, file = Api(place / "api"), place / "page"
        costs = {form: ([], [], []) for form in FORMS}
        for _ in range(args.rounds):
            for form, (sizes, scrapes, cats) in costs.items():
                each, page = scrape(api, server, FORMS[form], args.scrapes)
                file.write_bytes(page)
                sizes.append(len(page))
                scrapes.append(each)
                cats.append(cat(file))
    bar = BAR * args.disks / 1000
    print(f"CPU time of a scrape of {args.disks} disks, bar {bar * 1e3:.0f} ms:")
    for form, (sizes, scrapes, cats) in costs.items():
        print(told(form, sizes[-1], scrapes, cats))


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="fathom-scrape-") as directory:
        measure(args, Path(directory))


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"error: {e}")
