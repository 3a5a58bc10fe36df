#!/usr/bin/env python3
"""Random tests for longer, on all processors: tools/torture.py SEED ROUNDS

Served images under random requests, power cuts, kills and errors of their storage, and while they are backed up, mirrored, committed
and streamed; images that are changed offline likewise, and all combinations of options next to qemu-img. A failure ends nothing
else. At the end stands for each what to run to see it again.
"""

import concurrent.futures
import json
import os
import re
import subprocess
import sys

CARGO = os.environ.get("CARGO", "cargo")

# Rounds of one process: these tests keep what a killed server had in memory.
AT_ONCE = 2
# More than a test takes in one round: no two runs are the same.
SEEDS_A_ROUND = 10

# Each seed is another run.
SEEDED = ["model", "power_cut", "io_errors", "kill", "lying_keepsake", "compressed_writes", "resize"]
# So many rounds are one run.
LONG = ["edit", "bitmap"]
# Jobs on disks that are used: of these tests those with such names.
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


def run(job):
    """Runs one program; what to run again if it fails."""
    package, test, program, settings, *names = job
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


def main():
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    formats = programs("fathom-formats", SEEDED + LONG)
    # These run the fathom program next to them.
    subprocess.run([CARGO, "build", "--workspace", "--bin", "fathom"], check=True)
    cli = programs("fathom-cli", ["img", "serve"])
    whole = {"FATHOM_SEED": str(seed), "FATHOM_ROUNDS": str(rounds)}
    jobs = [("fathom-cli", "img", cli["img"], {"FATHOM_ROUNDS": str(rounds)})]
    jobs += [("fathom-formats", test, formats[test], whole) for test in LONG]
    for done in range(0, rounds, AT_ONCE):
        first = seed + done * SEEDS_A_ROUND
        settings = {"FATHOM_SEED": str(first), "FATHOM_ROUNDS": str(AT_ONCE)}
        jobs += [("fathom-formats", test, formats[test], settings) for test in SEEDED]
        jobs.append(("fathom-cli", "serve", cli["serve"], {"FATHOM_SEED": str(first)}, *JOBS))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        again = [command for commands in pool.map(run, jobs) for command in commands]
    if again:
        print("\nFailures, to be seen again by:", *again, sep="\n  ")
        sys.exit(1)
    print(f"\nNo failure in {len(jobs)} runs, with seeds from {seed} on.")


if __name__ == "__main__":
    main()
