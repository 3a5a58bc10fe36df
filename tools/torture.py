#!/usr/bin/env python3
"""Runs the randomized tests for longer, on all processors: tools/torture.py SEED ROUNDS [MINUTES]

The tests serve images under random requests, power cuts, kills and storage errors, and run backups, mirrors, commits, streams and
snapshots on them. Other tests change images offline, and compare all combinations of options with qemu-img. A failure does not
stop the other runs. The report at the end has, for each failure, the command that repeats it.

Each round uses new seeds. Within a round, jobs on served disks run first and storage errors last. No run starts later than
MINUTES after the first one (no limit by default).
"""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time

CARGO = os.environ.get("CARGO", "cargo")

# Rounds of one process: these tests keep the memory of each killed server until they end.
AT_ONCE = 2
# Distance between the first seeds of two rounds; larger than the number of seeds that a round uses.
SEEDS_A_ROUND = 10

# Tests of fathom-formats that run once for each seed.
SEEDED = ["model", "power_cut", "kill", "lying_keepsake", "compressed_writes", "resize"]
# Runs with more than one round fail every single storage operation, which takes hours: each run has one round.
STORAGE_ERRORS = "io_errors"
# Tests of fathom-formats that make all rounds in one run.
LONG = ["edit", "bitmap"]
# Modules of fathom-cli's test `serve` that run jobs on disks in use.
JOBS = ["backups", "bitmaps", "commits", "internal", "middles", "mirror", "snapshots", "streams"]


def programs(package, tests):
    """The test programs of a package, built, by name."""
    # A package alone would be built with other features, and all that it needs once more.
    command = [CARGO, "test", "--no-run", "--message-format=json-render-diagnostics", "--workspace"]
    command += [f"--test={test}" for test in tests]
    built = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    units = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
    ours = [u for u in units if u.get("executable") and f"#{package}@" in u["package_id"]]
    return {u["target"]["name"]: u["executable"] for u in ours}


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


def run(job, until):
    """Runs one program unless the time is up. Returns the commands that repeat its failures, or None without a run."""
    package, test, program, settings, *names = job
    if time.monotonic() > until:
        return None
    command = [program, "--test-threads=1", *names]
    done = subprocess.run(
        command,
        cwd=f"crates/{package.removeprefix('fathom-')}",
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    said = " ".join(f"{key}={value}" for key, value in settings.items())
    if done.returncode == 0:
        print(f"ok      {test} {said}", flush=True)
        return []
    print(f"{done.stdout}\nFAILED  {test} {said}", flush=True)
    return failures(package, test, settings, done.stdout)


def plan(programs_of, seed, rounds):
    """Returns all runs in their order."""
    formats, cli = programs_of
    jobs = []
    for done in range(0, rounds, AT_ONCE):
        first = {"FATHOM_SEED": str(seed + done * SEEDS_A_ROUND)}
        settings = first | {"FATHOM_ROUNDS": str(AT_ONCE)}
        jobs.append(("fathom-cli", "serve", cli["serve"], first, *JOBS))
        jobs += [("fathom-formats", test, formats[test], settings) for test in SEEDED]
        if done == 0:
            whole = {"FATHOM_SEED": str(seed), "FATHOM_ROUNDS": str(rounds)}
            jobs.append(("fathom-cli", "img", cli["img"], {"FATHOM_ROUNDS": str(rounds)}))
            jobs += [("fathom-formats", test, formats[test], whole) for test in LONG]
        once = first | {"FATHOM_ROUNDS": "1"}
        jobs.append(("fathom-formats", STORAGE_ERRORS, formats[STORAGE_ERRORS], once))
    return jobs


def main():
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    minutes = float(sys.argv[3]) if len(sys.argv) > 3 else float("inf")
    formats = programs("fathom-formats", [*SEEDED, *LONG, STORAGE_ERRORS])
    # The tests of fathom-cli run the fathom program next to them.
    subprocess.run([CARGO, "build", "--workspace", "--bin", "fathom"], check=True)
    cli = programs("fathom-cli", ["img", "serve"])
    jobs = plan((formats, cli), seed, rounds)
    until = time.monotonic() + minutes * 60
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        ran = [commands for commands in pool.map(lambda job: run(job, until), jobs) if commands is not None]
    again = [command for commands in ran for command in commands]
    if again:
        print("\nFailures, repeated by:", *again, sep="\n  ")
        sys.exit(1)
    print(f"\nNo failure in {len(ran)} of {len(jobs)} runs, with seeds from {seed} on.")


if __name__ == "__main__":
    main()
