#!/usr/bin/env python3
"""What it takes to see very many hosts: by `fathom fleet`, and by Prometheus.

Some servers stand for all hosts: each host is an address of its own (127.x.y.z) at which one of them listens,
so that connections, certificates, answers and their merging are real, and only the servers' machines are
not. Prometheus scrapes some hundreds of these; what that takes for a disk is what is multiplied.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import scrape
from experiment import TARGET
from noise import process_seconds
from process import Failed, run, running

RULES = Path(__file__).resolve().parents[2] / "packaging/prometheus/fathom.rules.yml"
UNPACKED = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fathom/prometheus/usr/bin"
# Of one Prometheus, as its users take them for large ones.
SERIES = 5_000_000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--fathom", type=Path, default=TARGET / "release" / "fathom")
    parser.add_argument("--hosts", type=int, nargs="+", default=[100, 1000, 10000],
                        help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=8,
                        help="that stand for them, default: %(default)s: some hundred are asked at once")
    parser.add_argument("--disks", type=int, default=10, help="of each host, default: %(default)s")
    parser.add_argument("--targets", type=int, default=200,
                        help="that Prometheus scrapes, default: %(default)s")
    parser.add_argument("--seconds", type=int, default=90,
                        help="that it does so, every 15 seconds, default: %(default)s")
    return parser.parse_args()


def certificates(place: Path) -> Path:
    """For both sides."""
    script = """
        new='-nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2'
        openssl req -x509 $new -subj /CN=ours -keyout ca-key.pem -out ca-cert.pem
        echo subjectAltName=DNS:fleet.example >names
        for who in server client; do
            openssl req $new -subj /CN=$who -keyout $who-key.pem -out request
            openssl x509 -req -in request -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 \\
                -extfile names -out $who-cert.pem
        done"""
    place.mkdir()
    run(["sh", "-ec", f"cd '{place}'; {script}"], 20)
    return place


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("0.0.0.0", 0))
        return found.getsockname()[1]


def start(args: argparse.Namespace, place: Path, tls: Path, stack: ExitStack) -> dict[int, int]:
    """The servers' processes, by their ports."""
    servers = {}
    for number in range(args.servers):
        home, port = place / f"server-{number}", free_port()
        home.mkdir()
        file = scrape.config(home, args.disks)
        of_api = f"listen = '0.0.0.0:{port}', tls-certificates = '{tls}', socket"
        file.write_text(file.read_text(encoding="utf-8").replace("socket", of_api, 1), encoding="utf-8")
        servers[port] = stack.enter_context(
            running([args.fathom, "serve", "--config", file], home / "api", None))
        scrape.load(args, home)
    return servers


def addresses(count: int) -> list[str]:
    return [f"127.{1 + n // 62500}.{n // 250 % 250}.{1 + n % 250}" for n in range(count)]


def hosts(count: int, servers: dict[int, int]) -> list[str]:
    ports = list(servers)
    return [f"{address}:{ports[n % len(ports)]}" for n, address in enumerate(addresses(count))]


def ask(command: list, servers: dict[int, int]) -> dict:
    """What it took: seconds, those of its CPU and of the servers', its memory; and the answer."""
    used, begin = -sum(map(process_seconds, servers.values())), time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE)
        memory, ended = 0, 0
        while not ended:
            # Not by what is told at its end, which has this program's memory in it.
            memory = max(memory, peak_of(process.pid))
            time.sleep(0.02)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.monotonic() - begin
        said = process.stderr.read().decode().strip()
        process.stderr.close()
        if process.returncode:
            raise Failed(said.splitlines()[-1] if said else f"{command[2]} has failed")
        output.seek(0)
        answer = json.load(output)
    return {"took": took, "own": usage.ru_utime + usage.ru_stime, "memory": memory / 2**20,
            "theirs": used + sum(map(process_seconds, servers.values())), "answer": answer}


def by_fleet(args: argparse.Namespace, place: Path, tls: Path, servers: dict[int, int]) -> None:
    print(f"fathom fleet, hosts of {args.disks} disks:")
    print(f"{'':7}{'hosts':>7}{'down':>6}{'seconds':>9}{'CPU s':>8}{'MiB':>7}  servers' CPU, each host")
    file = place / "hosts"
    silent = socket.socket()
    silent.bind(("0.0.0.0", 0))
    silent.listen(0)  # nobody is ever accepted
    for count in args.hosts:
        for command in ("list", "stats"):
            for down in (0, count // 100):
                named = hosts(count, servers)
                # Half of those that are down refuse, and half say nothing.
                for n in range(down):
                    port = silent.getsockname()[1] if n % 2 else 1
                    named[n * 97 % count] = f"127.200.{n // 250}.{1 + n % 250}:{port}"
                file.write_text("\n".join(named), encoding="utf-8")
                took = ask([args.fathom, "fleet", command, "--hosts", file, "--certificates", tls,
                            "--tls-hostname", "fleet.example", "--json"], servers)
                failed = len(took["answer"]["failed"])
                if failed != down:
                    raise Failed(f"{failed} of {count} hosts have not answered, {down} are down: "
                                 f"{took['answer']['failed'][:2]}")
                print(f"{command:7}{count:7}{down:6}{took['took']:9.1f}{took['own']:8.1f}"
                      f"{took['memory']:7.0f}  {1e3 * took['theirs'] / (count - down):.1f} ms", flush=True)
    silent.close()


def number(at: str, query: str) -> float:
    url = f"http://{at}/api/v1/query?query={urllib.request.quote(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        found = json.load(answer)["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def memory_of(pid: int, what: str = "VmRSS") -> int:
    """Bytes; 0: it has ended."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"{what}:\s+(\d+)", status)
    return int(found[1]) * 1024 if found else 0


def peak_of(pid: int) -> int:
    return memory_of(pid, "VmHWM")


def by_prometheus(args: argparse.Namespace, place: Path, tls: Path, servers: dict[int, int],
                  form: str) -> None:
    home, at = place / f"prometheus-{form}", f"127.0.0.1:{free_port()}"
    home.mkdir()
    named = hosts(args.targets, servers)
    config = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{
            "job_name": "fathom", "scheme": "https", "static_configs": [{"targets": named}],
            "tls_config": {"ca_file": str(tls / "ca-cert.pem"), "cert_file": str(tls / "client-cert.pem"),
                           "key_file": str(tls / "client-key.pem"), "server_name": "fleet.example"},
        }],
    }
    (home / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    program = UNPACKED / "prometheus"
    program = program if program.exists() else shutil.which("prometheus")
    if program is None:
        raise Failed("prometheus is not installed; `make setup` installs it")
    options = ["--enable-feature=native-histograms"] if form == "native" else []
    with open(home / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [program, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
             f"--web.listen-address={at}", *options], stdout=log, stderr=log)
    try:
        time.sleep(args.seconds)
        if process.poll() is not None:
            raise Failed(f"prometheus has ended: {(home / 'log').read_text(encoding='utf-8')[-300:]}")
        up = number(at, 'sum(up{job="fathom"})')
        with urllib.request.urlopen(f"http://{at}/metrics", timeout=20) as page:
            own = page.read().decode()
        series = float(re.search(r"^prometheus_tsdb_head_series (\S+)", own, re.MULTILINE)[1])
        if up != args.targets:
            raise Failed(f"{up:.0f} of {args.targets} targets are up")
        recorded = number(at, 'count({__name__=~"disk.*:fathom_.*"})')
        samples = number(at, "sum(scrape_samples_post_metric_relabeling)")
        memory, cpu = memory_of(process.pid), process_seconds(process.pid)
        if not series:
            raise Failed("prometheus does not tell of itself")
        size = sum(f.stat().st_size for f in (home / "data").rglob("*") if f.is_file())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    count = max(args.hosts)
    each = samples / args.targets
    all_of_them = each * count
    kept = recorded / args.targets * count
    print(f"{form:8}{each:10.0f}{each / args.disks:10.0f}{1e6 * cpu / args.seconds / series * 15:10.1f}"
          f"{memory / series:10.0f}{size / series:10.0f}{all_of_them / 1e6:12.1f}M"
          f"{all_of_them / 15 / 1e3:10.0f}k{-(-all_of_them // SERIES):8.0f}{kept / 1e6:11.1f}M", flush=True)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="fathom-fleet-") as directory, ExitStack() as stack:
        place = Path(directory)
        tls = certificates(place / "tls")
        servers = start(args, place, tls, stack)
        by_fleet(args, place, tls, servers)
        print(f"\nPrometheus, {args.targets} hosts of {args.disks} disks, scraped by TLS every 15 s; and what "
              f"follows for {max(args.hosts)}, in Prometheuses of {SERIES / 1e6:.0f}M series:")
        print(f"{'':8}{'series':>10}{'a disk':>10}{'us/series':>10}{'B/series':>10}{'disk B':>10}"
              f"{'all':>13}{'a second':>11}{'shards':>8}{'recorded':>12}")
        for form in ("classic", "native"):
            by_prometheus(args, place, tls, servers, form)


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"error: {e}")
