#!/usr/bin/env python3
"""Runs the randomized tests for longer, on all processors: tools/torture.py SEED MINUTES

The tests serve images under random requests, power cuts, kills and storage errors, and run backups, mirrors, commits, streams and
snapshots on them. Other tests change images offline, and compare all combinations of options with qemu-img. A failure does not
stop the other runs. The report at the end has, for each failure, the command that repeats it.

Rounds follow each other, with new seeds each, until the MINUTES are over: tests begin nothing more then, and jobs on served
disks, which take some minutes, come to their end. Within a round, these jobs run first and storage errors last.

What was tried is counted by the tests (crates/testing), printed each minute, and added as one line of JSON to target/torture.json.
"""

import collections
import concurrent.futures
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

CARGO = os.environ.get("CARGO", "cargo")
LEDGER = "target/torture.json"

# Seeds that a run uses one after the other. These tests keep the memory of each killed server until they end.
SEEDS_A_RUN = 2
# Distance between the first seeds of two rounds; larger than the number of seeds that a round uses.
SEEDS_A_ROUND = 10
# How much longer than in `make test` the tests are that make all rounds in one run, and those that kill servers during jobs.
LONGER = 8
JOB_ROUNDS = 4
# States of each world in which the control plane is explored.
MODEL_STATES = 3_000_000

# Modules of fathom-formats' test `formats` that run once for each seed.
SEEDED = ["model::", "power_cut::", "kill::", "hostile_saved_state::", "compressed_writes::", "resize::"]
# Runs with more than one round fail every single storage operation, which takes hours: each run has one round.
STORAGE_ERRORS = "io_errors::"
# Those that make all rounds in one run.
LONG = ["edit::", "bitmap::"]
# Parts of fathom-cli's test `serve` that run jobs on disks in use, switch disks to other images, kill servers, and make up requests
# to the API.
JOBS = [
    "switch_kills",
    "control_kills",
    "upgrade::kills",
    "backups",
    "bitmaps",
    "commits",
    "internal",
    "middles",
    "mirror",
    "snapshots",
    "streams",
    "a_client_that_makes_up_requests",
]


def programs(package, tests):
    """The test programs of a package, built, by name."""
    # A package alone would be built with other features, and all that it needs once more.
    command = [CARGO, "test", "--no-run", "--message-format=json-render-diagnostics", "--workspace"]
    command += [f"--test={test}" for test in tests]
    built = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    units = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
    ours = [u for u in units if u.get("executable") and f"#{package}@" in u["package_id"]]
    return {u["target"]["name"]: u["executable"] for u in ours}


def plan(formats, cli, model, seed):
    """Returns all runs in their order, without end. `formats` and `model` are programs, `cli` has programs by name."""
    for done in itertools.count():
        first = {"FATHOM_SEED": str(seed + done * SEEDS_A_ROUND)}
        some = first | {"FATHOM_ROUNDS": str(SEEDS_A_RUN)}
        longer = first | {"FATHOM_ROUNDS": str(LONGER)}
        once = first | {"FATHOM_ROUNDS": "1"}
        yield "fathom-cli", "serve", cli["serve"], first | {"FATHOM_ROUNDS": str(JOB_ROUNDS)}, JOBS
        for module in SEEDED:
            yield "fathom-formats", "formats", formats, some, [module]
        if done == 0:
            # All that there is, whatever the seed.
            yield "fathom-cli", "img", cli["img"], {"FATHOM_ROUNDS": "1"}, []
            yield "fathom-control", "model", model, {"FATHOM_MODEL_STATES": str(MODEL_STATES)}, []
        for module in LONG:
            yield "fathom-formats", "formats", formats, longer, [module]
        yield "fathom-formats", "formats", formats, once, [STORAGE_ERRORS]


def failures(package, test, settings, output):
    """What to run again, from what a test program has printed."""
    again, name = [], None
    for line in output.splitlines():
        if found := re.match(r"---- (\S+) stdout ----", line):
            name, case = found[1], ""
        elif name and (found := re.match(r"with (FATHOM_CASE=\S+) FATHOM_SEED=(\d+)", line)):
            case = f"{found[1]} "
            settings = settings | {"FATHOM_SEED": found[2]}
        elif name and line == "failures:":
            break
        else:
            continue
        given = " ".join(f"{key}={value}" for key, value in settings.items())
        command = f"{case}{given} cargo test -p {package} --test {test} {name}"
        again = [c for c in again if not c.endswith(f" {name}")] + [command]
    return again or [f"cargo test -p {package} --test {test}  # ended without saying why"]


def tried(tally):
    """What the tests have counted in this file so far."""
    counts = collections.Counter()
    with open(tally, encoding="ascii") as lines:
        for name, number in (line.split() for line in lines):
            counts[name] += int(number)
    return counts


def said(counts):
    return ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items())) or "nothing yet"


class Torture:
    def __init__(self, jobs, until, tally):
        self.jobs, self.until, self.tally = jobs, until, tally
        self.next = threading.Lock()
        self.runs = collections.Counter()
        self.again = []

    def work(self):
        """Runs one program after the other until the time is up."""
        while time.time() < self.until:
            with self.next:
                job = next(self.jobs)
            self.run(job)

    def run(self, job):
        package, test, program, settings, names = job
        command = [program, "--test-threads=1", *names]
        done = subprocess.run(
            command,
            cwd=f"crates/{package.removeprefix('fathom-')}",
            env=os.environ | settings | {"FATHOM_TALLY": self.tally, "FATHOM_UNTIL": str(int(self.until))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        shown = " ".join([test, *names, *(f"{key}={value}" for key, value in settings.items())])
        if done.returncode == 0:
            print(f"ok      {shown}", flush=True)
            self.runs["ok"] += 1
        else:
            print(f"{done.stdout}\nFAILED  {shown}", flush=True)
            self.runs["failed"] += 1
            self.again += failures(package, test, settings, done.stdout)


def version():
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--tags"], stdout=subprocess.PIPE, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def main():
    seed, minutes = int(sys.argv[1]), float(sys.argv[2])
    formats = programs("fathom-formats", ["formats"])["formats"]
    model = programs("fathom-control", ["model"])["model"]
    # The tests of fathom-cli run the fathom program next to them.
    subprocess.run([CARGO, "build", "--workspace", "--bin=fathom", "--test=serve"], check=True)
    cli = programs("fathom-cli", ["img", "serve"])
    begin = time.time()
    with tempfile.NamedTemporaryFile() as tally:
        torture = Torture(plan(formats, cli, model, seed), begin + minutes * 60, tally.name)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            workers = [pool.submit(torture.work) for _ in range(os.cpu_count())]
            while concurrent.futures.wait(workers, timeout=60).not_done:
                passed = (time.time() - begin) / 60
                print(f"{passed:.0f} min: {said(tried(tally.name))}", flush=True)
            for worker in workers:
                worker.result()
        counts = tried(tally.name)
    entry = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": version(),
        "seed": seed,
        "minutes": round((time.time() - begin) / 60, 1),
        "runs": dict(torture.runs),
        "tried": dict(sorted(counts.items())),
        "failures": torture.again,
    }
    with open(LEDGER, "a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(entry) + "\n")
    print(f"\nTried in {entry['minutes']} minutes, with seeds from {seed} on: {said(counts)} (added to {LEDGER}).")
    if torture.again:
        print("\nFailures, repeated by:", *torture.again, sep="\n  ")
        sys.exit(1)
    print("No failure.")


if __name__ == "__main__":
    main()
