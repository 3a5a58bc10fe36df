#!/usr/bin/env python3
"""How exact filters are: what `delay` adds with thousands of requests in
flight, and what `throttle` lets through in ten seconds.

The stage `queue` of each request, from the trace, is compared with the delay
that was asked for; the load's clock with the rate that was. Run it on a machine that does nothing
else: what it prints as an error is also whatever else the machine does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from process import is_listening

# Requests in flight on each queue, and queues.
DEPTHS = [(1, 1), (128, 1), (1024, 1), (1024, 4)]
DELAYS_MS = [1, 20, 200]
RATES = [300, 3000, 30000]


class Server:
    def __init__(self, fathom, scratch, filters):
        self.fathom = fathom
        self.socket = os.path.join(scratch, "filters.sock")
        self.control = os.path.join(scratch, "filters.control")
        self.trace = os.path.join(scratch, "filters.trace")
        options = [word for spec in filters for word in ("--filter", spec)]
        command = [fathom, "serve", "null:1T", "--vhost-user", self.socket,
                   "--control", self.control, "--trace", self.trace, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not is_listening(self.control) or not is_listening(self.socket):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit("filters: the server did not start: " + " ".join(command))
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def ask(self, *command):
        done = subprocess.run([self.fathom, *command], check=True, capture_output=True,
                              timeout=300)
        return json.loads(done.stdout)

    def bench(self, depth, queues, seconds):
        return self.ask("bench", "--vhost-user", self.socket, "--json", "--rw", "randread",
                        "--bs", "4k", "--iodepth", str(depth), "--queues", str(queues),
                        "--runtime", f"{seconds}s")

    def waited_ns(self):
        """Sorted, of the last 32768 requests."""
        lines = subprocess.run([self.fathom, "trace", self.trace, "--json"], check=True,
                               capture_output=True, timeout=300).stdout.splitlines()
        requests = [json.loads(line) for line in lines]
        return sorted(r["stages"]["queue_ns"] for r in requests if "stages" in r)


def delays(fathom, scratch, seconds):
    print("delay asked   in flight   requests/s   too late by (us): p50      p99      max"
          "   server CPU us/request")
    for ms in DELAYS_MS:
        for depth, queues in DEPTHS:
            with Server(fathom, scratch, [f"delay:read={ms}ms"]) as server:
                load = server.bench(depth, queues, seconds)
                late = [(ns - ms * 1e6) / 1e3 for ns in server.waited_ns()]
            at = [late[min(int(q * len(late)), len(late) - 1)] for q in (0.5, 0.99, 1)]
            cpu = load["backend"]["cpu_us_per_request"]
            print(f"{ms:>8} ms {depth * queues:>11} {load['iops']:>12.0f} {at[0]:>22.1f}"
                  f" {at[1]:>8.1f} {at[2]:>8.1f} {cpu:>23.2f}", flush=True)


def throttles(fathom, scratch, seconds):
    print("\nrate asked   delivered      error")
    for rate in RATES:
        with Server(fathom, scratch, [f"throttle:iops-total={rate}"]) as server:
            iops = server.bench(32, 1, seconds)["iops"]
        print(f"{rate:>10} {iops:>11.1f} {(iops / rate - 1) * 100:>9.2f}%", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("fathom", help="the program (of a release build)")
    parser.add_argument("--seconds", type=int, default=3, help="for each delay")
    parser.add_argument("--throttle-seconds", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        delays(arguments.fathom, scratch, arguments.seconds)
        throttles(arguments.fathom, scratch, arguments.throttle_seconds)


if __name__ == "__main__":
    main()
