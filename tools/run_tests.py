#!/usr/bin/env python3
"""Runs the test programs of the workspace: tools/run_tests.py [--times] [--hogs N] [PROGRAM ...]

Runs one program more than there are processors at a time, then, one after the other, the programs that measure or trace the machine.
Each program has its own directory in which servers are found (/run/fathom): a server that a test has stopped would hold up others
that list all servers. What a program prints is in target/tests/PROGRAM.log, and on the terminal if it fails. After the last program,
no process, loop device or mount of the tests may be left.

--times    prints how long each program and each test took, as Markdown (docs/testing.md has such a table)
--hogs N   keeps N processes running that want a processor, to see whether the tests hold on a busy machine
PROGRAM    runs only these, by the names that are printed, or parts of them

The exit status is 1 if a test fails or something is left.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

CARGO = os.environ.get("CARGO", "cargo")
LOGS = pathlib.Path("target/tests").absolute()
PROCESSORS = os.cpu_count() or 1

# Programs that measure or trace the machine: nothing else runs then.
ALONE = {
    f"{package} {name}"
    for package, names in {
        "cli": "breakdown ffsb lab_settings syscalls",
        "lab": "attributes path technologies tracing",
        "tests": "boot limiter",
    }.items()
    for name in names.split()
} | {"lab (unit tests)"}
# Those that take longest begin first, so that none of them is left at the end.
LONGEST = (
    ["tests guests", "cli serve", "formats formats", "cli fleet", "cli base", "cli img", "exports exports", "report report"]
    + ["cli book", "storage disks", "cli allocations", "cli moving"]
)
# They have tests that need root, and are ignored else.
WITH_ROOT = {"storage devices", "cli serve", "cli img", "cli libvirt"}
# No test takes so long, however busy the machine is: a program in which none has ended for that time hangs.
LIMIT_S = 900
# How long what the tests have started may take to end.
GRACE_S = 20
# Free space in target/ without which tests fail at odd places, in bytes. (The tests use less than 1 GiB at a time.)
NEEDED_SPACE = 4 << 30
# In the environment of whatever the tests start.
MARK = f"FATHOM_TEST_RUN={os.getpid()}"

# Programs and tests that take less are not in the tables.
SHOWN_PROGRAM_S, SHOWN_TEST_S = 5, 10
# A line that libtest prints with --report-time.
ENDED = re.compile(r"test (.*) \.\.\. (ok|FAILED|ignored.*) <([0-9.]+)s>")
# Libtest prints it before what the tests that failed have printed.
FAILURES = "\nfailures:\n"
SHOWN_CHARACTERS = 100_000
RESULT = re.compile(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")


# A process that wants a processor, as long as its parent runs.
HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


class Program:
    def __init__(self, unit):
        self.dir = pathlib.Path(unit["manifest_path"]).parent
        self.path = unit["executable"]
        self.package = self.dir.name
        kinds, name = unit["target"]["kind"], unit["target"]["name"]
        part = name if "test" in kinds else "(unit tests of the program)" if "bin" in kinds else "(unit tests)"
        self.name = f"{self.package} {part}"

    def is_alone(self):
        return self.name in ALONE

    def threads(self):
        """How many of its tests run at once. Guests are emulated: they want a processor each."""
        return PROCESSORS if self.is_alone() or self.name == "tests guests" else 3 * PROCESSORS // 2

    def order(self):
        return LONGEST.index(self.name) if self.name in LONGEST else len(LONGEST)


class Ran:
    """What came of a program."""

    def __init__(self, name, seconds, busy, log, status):
        # `busy`: of how many processors it used the time, on average.
        self.name, self.seconds, self.busy, self.log = name, seconds, busy, log
        printed = log.read_text(encoding="utf-8", errors="replace")
        found = RESULT.search(printed)
        self.passed, self.failed, self.ignored = (int(n) for n in found.groups()) if found else (0, 0, 0)
        self.is_ok = status == 0 and found is not None
        self.tests = [(float(test[3]), test[1]) for test in map(ENDED.fullmatch, printed.splitlines()) if test]

    def say(self):
        """Prints what came of it."""
        what = "ok    " if self.is_ok else "FAILED"
        counts = f"{self.passed} passed, {self.failed} failed, {self.ignored} ignored"
        print(f"{what} {self.seconds:6.1f} s  {self.name}: {counts}", flush=True)
        if not self.is_ok:
            print(self.why(), flush=True)

    def why(self):
        """What the tests that failed have printed. (All of it is in the log.)"""
        printed = self.log.read_text(encoding="utf-8", errors="replace")
        at = printed.find(FAILURES)
        shown = printed[at:] if at >= 0 else printed
        return shown if len(shown) <= SHOWN_CHARACTERS else f"[...]\n{shown[-SHOWN_CHARACTERS:]}"


def programs():
    """All test programs, built. With all packages at once, as features are those that all of them need together."""
    command = [CARGO, "test", "--workspace", "--all-targets", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    units = (json.loads(line) for line in built.splitlines())
    ours = [u for u in units if u.get("executable") and u["profile"]["test"]]
    found = [Program(unit) for unit in ours if "example" not in unit["target"]["kind"]]
    return sorted(found, key=Program.order)


# Runs a program with a /run/fathom and a /tmp of its own. In memory, as tests make and remove very many files.
IN_ITS_WORLD = 'mkdir -p /run/fathom && mount -t tmpfs none /run/fathom && exec "$@"'
if not pathlib.Path.cwd().is_relative_to("/tmp"):
    IN_ITS_WORLD = "mount -t tmpfs none /tmp && " + IN_ITS_WORLD


def run(program, words=()):
    """Runs a program."""
    suffix = "-".join(["", *(word.strip("-") for word in words)])
    log = LOGS / (re.sub(r"[ ()]+", "-", program.name).strip("-") + suffix + ".log")
    key, value = MARK.split("=")
    # Libtest tells times on request only where unstable options are allowed.
    env = os.environ | {key: value, "RUST_TEST_THREADS": str(program.threads()), "RUSTC_BOOTSTRAP": "1"}
    command = [program.path, "-Zunstable-options", "--report-time", *words]
    with tempfile.TemporaryDirectory() as runtime_dir:
        if os.geteuid() == 0:
            command = ["unshare", "--mount", "sh", "-c", IN_ITS_WORLD, "sh", *command]
        else:
            env["XDG_RUNTIME_DIR"] = runtime_dir
        seconds, busy, status = finish(command, env, program.dir, log)
    return Ran(program.name + suffix.replace("-", " "), seconds, busy, log, status)


def finish(command, env, cwd, log):
    """Runs a command to its end: returns how many seconds it took, how many processors it used on average, and its status."""
    begin = time.monotonic()
    with open(log, "wb") as out:
        child = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        ended = threading.Event()
        watcher = threading.Thread(target=watch, args=(child, log, ended))
        watcher.start()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        watcher.join()
        seconds = time.monotonic() - begin
    return seconds, (used.ru_utime + used.ru_stime) / seconds, child.returncode


def watch(child, log, ended):
    """Kills a program that has printed nothing for too long."""
    while not ended.wait(5):
        if time.time() - log.stat().st_mtime > LIMIT_S:
            with open(log, "ab") as out:
                out.write(f"\nkilled: no test has ended for {LIMIT_S} s\n".encode())
            child.kill()
            return


def doc_tests():
    log = LOGS / "documentation.log"
    seconds, busy, status = finish([CARGO, "test", "--workspace", "--doc"], os.environ, None, log)
    ran = Ran("examples in the documentation of code", seconds, busy, log, status)
    results = RESULT.findall(log.read_text(encoding="utf-8", errors="replace"))
    ran.passed, ran.failed, ran.ignored = (sum(int(result[n]) for result in results) for n in range(3))
    return ran


def run_all(wanted, is_busy, with_documentation):
    """Runs them, and says what came of each as it ends."""
    ran = []

    def note(one):
        one.say()
        ran.append(one)

    beside = [(run, program) for program in wanted if not program.is_alone()]
    if os.geteuid() == 0:
        beside += [(run, program, ["--ignored"]) for program in wanted if program.name in WITH_ROOT]
    else:
        print("not root, so the tests on loop devices and mounts did NOT run", file=sys.stderr)
    if with_documentation:
        beside.append((doc_tests,))
    # One more than there are processors, as many wait most of the time; and one more beside hogs, which take most of the time.
    with concurrent.futures.ThreadPoolExecutor(PROCESSORS + (2 if is_busy else 1)) as pool:
        for ended in concurrent.futures.as_completed([pool.submit(*call) for call in beside]):
            note(ended.result())
    for program in wanted:
        if program.is_alone():
            note(run(program))
    return ran


def mounts():
    return {line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()}


def loops():
    return {path.parts[3] for path in pathlib.Path("/sys/block").glob("loop*/loop/backing_file")}


def processes():
    """Those that the tests have started."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if path.joinpath("environ").read_bytes().split(b"\0").count(MARK.encode()):
                command = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.add(f"process {path.name}: {command[:150]}")
        except OSError:
            # It has ended, or is nobody's to look at.
            continue
    return found


def left(before):
    """What the tests have left, after a time to go away."""
    until = time.monotonic() + GRACE_S
    while True:
        now = {f"mount {at}" for at in mounts() - before[0]} | {f"device {at}" for at in loops() - before[1]} | processes()
        if not now or time.monotonic() > until:
            return sorted(now)
        time.sleep(0.2)


def tell_times(ran):
    print(f"\n| program ({SHOWN_PROGRAM_S} s and more) | tests | s | processors used |\n|---|---|---|---|")
    for one in sorted(ran, key=lambda one: -one.seconds):
        if one.seconds >= SHOWN_PROGRAM_S:
            print(f"| {one.name} | {one.passed + one.failed} | {one.seconds:.0f} | {one.busy:.1f} |")
    print(f"\n| test ({SHOWN_TEST_S} s and more) | s |\n|---|---|")
    tests = [(seconds, f"{r.name}: {name}") for r in ran for seconds, name in r.tests if seconds >= SHOWN_TEST_S]
    for seconds, name in sorted(tests, reverse=True):
        print(f"| {name} | {seconds:.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--hogs", type=int, default=0, metavar="N")
    parser.add_argument("program", nargs="*")
    args = parser.parse_args()
    wanted = [p for p in programs() if not args.program or any(word in p.name for word in args.program)]
    if not wanted:
        sys.exit(f"no test program is called {' or '.join(args.program)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(LOGS).free
    if free < NEEDED_SPACE:
        sys.exit(f"{LOGS.parent}: {free / 2**30:.1f} GiB are free, and the tests need {NEEDED_SPACE / 2**30:.0f}; free some space")
    before, begin = (mounts(), loops()), time.monotonic()
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(args.hogs)]
    try:
        ran = run_all(wanted, args.hogs > 0, with_documentation=not args.program)
    finally:
        for hog in hogs:
            hog.kill()
    rest = left(before)
    if args.times:
        tell_times(ran)
    failed = [r for r in ran if not r.is_ok]
    print(
        f"\n{len(ran)} programs, {sum(r.passed for r in ran)} tests passed, {sum(r.failed for r in ran)} failed, "
        f"in {(time.monotonic() - begin) / 60:.0f} minutes"
    )
    for one in failed:
        print(f"FAILED: {one.name} ({one.log})")
    for what in rest:
        print(f"left by the tests: {what}")
    sys.exit(1 if failed or rest else 0)


if __name__ == "__main__":
    main()
