#!/usr/bin/env python3
"""What Fathom's stamps and histograms cost: the same daemon with them and
compiled without them (--cfg fathom_unstamped), interleaved.

Prints the daemon's CPU time per request on null at depth 128 and the IOPS on
a file with O_DIRECT at depth 32, medians of the rounds. And with the trace
ring switched on, the same on null.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from process import is_listening


def build(target_dir, flags):
    env = dict(os.environ, RUSTFLAGS=flags, CARGO_TARGET_DIR=target_dir)
    command = ["cargo", "build", "--quiet", "--release", "--package", "fathom-cli"]
    subprocess.run(command, check=True, env=env)
    return os.path.join(target_dir, "release", "fathom")


def measure(fathom, client, disk, depth, seconds, scratch, *options):
    sock = os.path.join(scratch, "stamps.sock")
    serve = ["taskset", "-c", "1", fathom, "serve", disk, "--vhost-user", sock, *options]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not is_listening(sock):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit("stamps: the server did not start: " + " ".join(serve))
            time.sleep(0.02)
        bench = ["taskset", "-c", "0", client, "bench", "--vhost-user", sock, "--json",
                 "--rw", "randread", "--bs", "4k", "--iodepth", str(depth),
                 "--runtime", f"{seconds}s", "--ramp-time", "300ms"]
        result = json.loads(subprocess.run(bench, check=True, capture_output=True).stdout)
    finally:
        server.terminate()
        server.wait()
    return result["backend"]["cpu_us_per_request"] * 1000, result["iops"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=1)
    arguments = parser.parse_args()

    target = os.environ.get("CARGO_TARGET_DIR", "target")
    stamped = build(target, "")
    unstamped = build(os.path.join(target, "unstamped"), "--cfg fathom_unstamped")
    null = "null:1T"
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        image = os.path.join(scratch, "image")
        with open(image, "wb") as file:
            for _ in range(1024):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        trace = os.path.join(scratch, "trace")
        cpu = {"unstamped": [], "stamped": [], "traced": []}
        iops = {"unstamped": [], "stamped": []}
        for _ in range(arguments.rounds):
            for name, fathom, options in [("unstamped", unstamped, []), ("stamped", stamped, []),
                                          ("traced", stamped, ["--trace", trace])]:
                cpu[name].append(measure(fathom, stamped, null, 128, arguments.seconds,
                                         scratch, *options)[0])
            for name, fathom in [("unstamped", unstamped), ("stamped", stamped)]:
                iops[name].append(measure(fathom, stamped, image, 32, arguments.seconds,
                                          scratch)[1])
    median = {name: statistics.median(values) for name, values in cpu.items()}
    print(f"null, depth 128, daemon CPU per request: "
          f"{median['unstamped']:.0f} ns without stamps, {median['stamped']:.0f} ns with them "
          f"(+{median['stamped'] - median['unstamped']:.0f}), {median['traced']:.0f} ns traced "
          f"(+{median['traced'] - median['stamped']:.0f})")
    ratio = statistics.median(s / u for s, u in zip(iops["stamped"], iops["unstamped"]))
    print(f"file, O_DIRECT, depth 32: IOPS with stamps {ratio:.3f} of those without")


if __name__ == "__main__":
    main()
