#!/usr/bin/env python3
"""Tries the Debian package in minimal systems, as root: tools/test_package.py [SUITE...]

Installs it, serves disks by it, upgrades it while clients read and write, removes and purges it, and
looks for what is left. In a system with libvirt, does what docs/libvirt.md says. Then has the static
program run in a system of nothing but busybox. The minimal systems are debootstrap's, kept in the cache
that the lab has its images in.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", "target")).absolute()
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fathom"
MIRROR = "http://deb.debian.org/debian"
SUITES = ["bookworm", "trixie"]
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "DEBIAN_FRONTEND": "noninteractive",
    "LC_ALL": "C",
    "HOME": "/root",
}
MOST_BYTES = 24 << 20

# Reads back what it has written, on one connection, until the file STOP is there.
NBD_CLIENT = """
import os, random
h.connect_uri(os.environ["URI"])
blocks, rounds = {}, 0
def check(at):
    assert h.pread(4096, at * 4096) == blocks[at], f"block {at} after {rounds} rounds"
while not os.path.exists(os.environ["STOP"]):
    at = random.randrange(2048)
    blocks[at] = random.randbytes(4096)
    h.pwrite(blocks[at], at * 4096)
    check(random.choice(list(blocks)))
    rounds += 1
for at in blocks:
    check(at)
h.shutdown()
print(rounds)
"""

CONFIGURATION = """
disks-dir = "disks.d"
[nbd]
listen = ["unix:/run/fathom/nbd.sock"]
[[disk]]
name = "exported"
image = "/srv/exported.qcow2"
format = "qcow2"
"""


def say(text):
    print(f"test-package: {text}", flush=True)


def run(*command, **options):
    """Runs a command; what it prints, unless it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        **options,
    )
    if done.returncode:
        sys.exit(f"test-package: {command}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def eventually(what, done):
    """Waits until `done` has something to say."""
    for _ in range(300):
        if found := done():
            return found
        time.sleep(0.1)
    sys.exit(f"test-package: {what}: not within 30 seconds")


class System:
    """A Debian system in a directory, in which programs run."""

    PACKAGES = ""
    # Packages that apt installs, because they need more than debootstrap resolves.
    MORE = ""
    # What the package manager keeps, and the kernel.
    OTHERS = ("proc/", "dev/", "tmp/", "var/lib/dpkg/", "var/lib/apt/", "var/cache/", "var/log/")
    # By hand: no service manager runs.
    SERVICE = ["fathom", "serve", "--config", "/etc/fathom/fathom.toml"]

    def __init__(self, root):
        self.root = root
        self.started = []
        self.enter = ["chroot", str(root)]

    @contextlib.contextmanager
    def running(self):
        with mounted(("proc", self.root / "proc")):
            try:
                yield
            finally:
                self.end()

    def path(self, name):
        return self.root / name.lstrip("/")

    def run(self, *command):
        return run(*self.enter, *command, env=ENVIRONMENT)

    def start(self, *command):
        """Starts a program, whose output goes to a file."""
        log = tempfile.TemporaryFile("w+", dir=self.root / "tmp")
        process = subprocess.Popen(
            [*self.enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=ENVIRONMENT,
        )
        process.log = log
        self.started.append(process)
        return process

    def inside(self):
        """The processes that run in it, by id."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "root") == str(self.root):
                    found.append(int(entry.name))
        return found

    def end(self):
        for pid in self.inside():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()

    def install(self, package):
        shutil.copy(package, self.path("/tmp/fathom.deb"))
        return self.run("apt-get", "install", "-y", "--no-install-recommends", "/tmp/fathom.deb")

    def files(self):
        found = set()
        for directory, directories, files in os.walk(self.root):
            at = os.path.relpath(directory, self.root)
            for name in directories + files:
                path = os.path.normpath(os.path.join(at, name))
                if not f"{path}/".startswith(self.OTHERS):
                    found.add(path)
        return found

    def servers(self):
        """The process id of each disk's server."""
        return {disk["name"]: disk["pid"] for disk in json.loads(self.run("fathom", "list", "--json"))}


class Booted(System):
    """The same with systemd, in namespaces of its own."""

    PACKAGES = "systemd"
    OTHERS = (*System.OTHERS, "run/", "sys/", "var/lib/systemd/", "etc/machine-id/")
    SERVICE = None
    # Devices and settings of the kernel are this machine's, and files are looked at from outside: systemd
    # leaves alone what is mounted.
    BOOT = """
        mount --bind $0 $0
        mount --bind $0/run $0/run
        mount --bind $0/dev $0/dev
        mount --bind $0/tmp $0/tmp
        mount -t proc proc $0/proc
        mount --bind $0/proc/sys $0/proc/sys
        mount -o remount,bind,ro $0/proc/sys
        mount -t sysfs -o ro sysfs $0/sys
        mount -t cgroup2 cgroup2 $0/sys/fs/cgroup
        exec env -i container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot $0 /lib/systemd/systemd
    """

    @contextlib.contextmanager
    def running(self):
        spaces = ["--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        boot = ["--propagation", "private", "--fork", "--kill-child", "sh", "-e", "-c", self.BOOT]
        with subprocess.Popen(["unshare", *spaces, *boot, str(self.root)], stdin=subprocess.DEVNULL) as init:
            try:
                first = eventually("the first process", lambda: said_by("pgrep", "-P", str(init.pid)))
                root = [f"--{what}=/proc/{first}/root" for what in ["root", "wd"]]
                self.enter = ["nsenter", "--target", first, *spaces, *root]
                state = [*self.enter, "systemctl", "is-system-running"]
                eventually("systemd", lambda: said_by(*state) in ["running", "degraded"])
                yield
            finally:
                init.kill()
                for process in self.started:
                    process.wait()


class WithLibvirt(Booted):
    """The same with libvirt and QEMU."""

    MORE = "libvirt-daemon-system libvirt-clients qemu-system-x86 qemu-utils curl"


def said_by(*command):
    """What a command prints, whatever its exit status."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cached(suite, packages, more=""):
    """A file with the minimal system of a suite, and these packages."""
    file = CACHE / f"debian-{'-'.join([suite, *packages.split(), *more.split()[:1]])}.tar"
    if not file.exists():
        say(f"making {file}")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            system, new = Path(scratch) / "system", Path(scratch) / "tar"
            include = [f"--include={','.join(packages.split())}"] if packages else []
            run("debootstrap", "--variant=minbase", *include, suite, system, MIRROR)
            if more:
                install_more(system, more)
            run("tar", "--numeric-owner", "-C", system, "-cf", new, ".")
            new.rename(file)
    return file


def install_more(system, packages):
    # No service starts while packages are installed.
    policy = system / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    shutil.copy("/etc/resolv.conf", system / "etc/resolv.conf")
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages.split()]
    with mounted(("proc", system / "proc")):
        run("chroot", system, *install, env=ENVIRONMENT)
        run("chroot", system, "apt-get", "clean", env=ENVIRONMENT)
    policy.unlink()


@contextlib.contextmanager
def minimal(kind, suite):
    # Direct I/O must work there, and paths of sockets be short.
    root = Path(tempfile.mkdtemp(prefix="fathom-", dir="/var/tmp"))
    root.chmod(0o755)
    try:
        run("tar", "-C", root, "-xf", cached(suite, kind.PACKAGES, kind.MORE))
        system = kind(root)
        with system.running():
            yield system
    finally:
        shutil.rmtree(root)


def newer(package, directory):
    """The same package with a higher version."""
    tree, made = directory / "newer", directory / "newer.deb"
    run("dpkg-deb", "-R", package, tree)
    control = tree / "DEBIAN/control"
    version = re.search(r"^Version: (.*)$", control.read_text(), re.M)[1] + "+next"
    control.write_text(re.sub(r"^Version: .*$", f"Version: {version}", control.read_text(), flags=re.M))
    run("dpkg-deb", "-Zgzip", "-z1", "-b", tree, made)
    shutil.rmtree(tree)
    return made, version


def check_installed(system):
    say(f"  {system.run('fathom', '--version').strip()}")
    size = system.path("/usr/bin/fathom").stat().st_size
    assert size <= MOST_BYTES, f"the program has {size} bytes"
    for name in [
        "/usr/share/man/man1/fathom-serve.1.gz",
        "/usr/share/man/man5/fathom.toml.5.gz",
        "/usr/share/man/man5/fathom-run.5.gz",
        "/usr/share/bash-completion/completions/fathom",
        "/usr/share/zsh/vendor-completions/_fathom",
        "/usr/share/fish/vendor_completions.d/fathom.fish",
        "/usr/share/fathom/prometheus/fathom.alerts.yml",
        "/usr/share/fathom/grafana/fathom.json",
        "/usr/share/fathom/bpftrace/fathom-biolatency.bt",
        "/usr/lib/systemd/system/fathom.service",
        "/etc/fathom/fathom.toml",
    ]:
        assert system.path(name).is_file(), name
    page = run("man", "-l", system.path("/usr/share/man/man1/fathom-serve.1.gz"))
    assert "vhost-user" in page, page
    backend = json.loads(system.path("/usr/share/qemu/vhost-user/50-fathom.json").read_text())
    capabilities = json.loads(system.run(backend["binary"], "--print-capabilities"))
    assert capabilities["type"] == "block", capabilities


def serve(system):
    """Two servers: the service, to which a disk is added, and one by hand, for NBD clients."""
    system.run("fathom", "img", "create", "-f", "qcow2", "/srv/exported.qcow2", "64M")
    system.run("fathom", "img", "create", "-f", "raw", "/srv/added.img", "64M")
    system.path("/srv/fathom.toml").write_text(CONFIGURATION)
    if system.SERVICE:
        system.start(*system.SERVICE)
    eventually("the service", system.path("/run/fathom/api.sock").exists)
    system.start("fathom", "serve", "--config", "/srv/fathom.toml")
    eventually("the server by hand", system.path("/run/fathom/nbd.sock").exists)
    added = ["added", "/srv/added.img", "--vhost-user", "/run/fathom/added.sock"]
    system.run("fathom", "disk", "add", "--server", "/run/fathom/api.sock", *added)


def clients(system, stop):
    uri = f"nbd+unix:///exported?socket={system.path('/run/fathom/nbd.sock')}"
    by_nbd = subprocess.Popen(
        ["nbdsh", "-c", NBD_CLIENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The system's own Python, which has the module.
        env=ENVIRONMENT | {"URI": uri, "STOP": str(stop)},
    )
    load = "--rw randrw --bs 4k --iodepth 32 --verify --runtime 600s".split()
    by_vhost_user = system.start("fathom", "bench", "--vhost-user", "/run/fathom/added.sock", *load)
    return by_nbd, by_vhost_user


def output_of(process):
    process.wait(60)
    process.log.seek(0)
    return process.log.read()


def upgrade(system, package, version):
    stop = system.path("/tmp/stop")
    by_nbd, by_vhost_user = clients(system, stop)
    time.sleep(2)
    before = system.servers()
    assert set(before) == {"exported", "added"}, before
    said = system.install(package)
    after = system.servers()
    goes_on = re.findall(r"process (\d+) continues; requests waited for ([\d.]+) ms", said)
    assert {int(pid) for pid, _ in goes_on} == set(after.values()), f"{said}\n{after}"
    assert not set(before.values()) & set(after.values()), (before, after)
    for pid in after.values():
        same = system.run("stat", "-L", "-c", "%i", f"/proc/{pid}/exe", "/usr/bin/fathom").split()
        assert same[0] == same[1], f"process {pid} has the old program"
    if not system.SERVICE:
        main = system.run("systemctl", "show", "--property=MainPID,ActiveState,NRestarts", "fathom")
        assert sorted(main.split()) == ["ActiveState=active", f"MainPID={after['added']}", "NRestarts=0"]
    assert version in system.run("dpkg-query", "-W", "fathom")
    time.sleep(2)

    stop.touch()
    rounds = by_nbd.communicate(timeout=60)[0]
    assert by_nbd.returncode == 0, rounds
    assert by_vhost_user.poll() is None, output_of(by_vhost_user)
    # nsenter waits for it as its child; chroot has become it.
    os.kill(int(said_by("pgrep", "-P", str(by_vhost_user.pid)) or by_vhost_user.pid), signal.SIGINT)
    figures = output_of(by_vhost_user)
    assert by_vhost_user.returncode == 0, figures
    stop.unlink()
    pauses = ", ".join(pause for _, pause in goes_on)
    say(f"  upgraded under clients: pauses of {pauses} ms; {rounds.strip()} rounds by NBD went on, and")
    for line in figures.splitlines():
        say(f"    {line}")


def check_gone(system, before):
    # Removal ends the service and no other server: guests may have disks by that.
    servers = system.servers()
    by_hand = [servers["exported"]] if not system.SERVICE else servers.values()
    for pid in by_hand:
        system.run("fathom", "quit", str(pid))
    system.run("apt-get", "remove", "-y", "fathom")
    eventually("the service's end", lambda: not system.path("/run/fathom/api.sock").exists())
    kept = system.files() - before
    assert all(path.startswith(("etc/", "run/", "srv/", "var/lib/systemd")) for path in kept), kept
    assert {"etc/fathom/fathom.toml", "etc/fathom/disks.d/added.toml"} <= kept, kept
    system.run("apt-get", "purge", "-y", "fathom")
    assert not system.path("/run/fathom").exists()
    after = {path for path in system.files() if not path.startswith("srv/")}
    assert after == before, f"left: {sorted(after - before)}, lost: {sorted(before - after)}"


def try_package(kind, suite, package):
    say(f"{suite}, {kind.PACKAGES or 'no service manager'}: {package.name}")
    with minimal(kind, suite) as system, tempfile.TemporaryDirectory() as scratch:
        before = system.files()
        system.install(package)
        check_installed(system)
        serve(system)
        upgrade(system, *newer(package, Path(scratch)))
        check_gone(system, before)
        say("  removed and purged: nothing is left")


def block_of_docs(page, file):
    """The contents that a page gives to a file."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    found = re.search(rf"^```\w+ {re.escape(file)}\n(.*?)^```$", text, re.M | re.S)
    assert found, f"docs/{page} has no block of {file}"
    return found[1]


def try_libvirt(suite, package):
    """Follows docs/libvirt.md, with an emulated guest."""
    say(f"{suite}, libvirt: {package.name}")
    with minimal(WithLibvirt, suite) as system:
        system.install(package)
        system.run("systemctl", "restart", "libvirtd")
        system.path("/etc/fathom/fathom.toml").write_text(block_of_docs("libvirt.md", "fathom.toml"))
        system.run("systemctl", "restart", "fathom")
        system.path("/srv/images").mkdir()
        system.run("fathom", "img", "create", "-q", "-f", "qcow2", "/srv/images/web.qcow2", "20G")
        system.path("/srv/web.xml").write_text(block_of_docs("libvirt.md", "web.xml"))
        system.run("virsh", "define", "/srv/web.xml")
        system.run("virsh", "start", "web")
        disks = json.loads(system.run("fathom", "list", "--json"))
        assert [disk["name"] for disk in disks] == ["web-vda"], disks
        assert disks[0]["front_end"], disks
        metrics = system.run("curl", "-s", "http://127.0.0.1:9825/metrics")
        assert 'fathom_front_end_connected{disk="web-vda"} 1' in metrics, metrics
        # What the guest has must not be changed by its restart.
        system.run("systemctl", "restart", "fathom")
        listed = lambda: json.loads(system.run("fathom", "list", "--json"))
        eventually("the front-end is back", lambda: [disk for disk in listed() if disk["front_end"]])
        system.run("virsh", "destroy", "web")
        eventually("the disk's removal", lambda: listed() == [])
        # A disk that cannot be added keeps the guest from starting, and virsh says why.
        system.path("/srv/images/web.qcow2").unlink()
        failed = subprocess.run([*system.enter, "virsh", "start", "web"], capture_output=True, text=True, env=ENVIRONMENT)
        assert failed.returncode and "web.qcow2" in failed.stderr, failed
        say("  a guest had its disk by the hook, over a restart of the server, until its end")


def built():
    """The package that was built last."""
    made = (TARGET / "debian").glob("fathom_*.deb")
    return max(made, key=lambda file: file.stat().st_mtime)


def main():
    if os.geteuid() != 0:
        sys.exit("test-package: this makes systems to change root to: run it as root")
    package = built()
    # (Not of the debug symbols, whose package is cargo-deb's own.)
    say(run("lintian", "--fail-on", "error,warning", "--allow-root", package) or "lintian has nothing to say")
    for suite in sys.argv[1:] or SUITES:
        for kind in [System, Booted]:
            try_package(kind, suite, package)
        try_libvirt(suite, package)
    try_static(TARGET / "fathom-static")


@contextlib.contextmanager
def mounted(*places):
    """File systems of the kernel's, by their kinds and places."""
    done = []
    try:
        for kind, place in places:
            run("mount", "-t", kind, kind, place)
            done.append(place)
        yield
    finally:
        for place in reversed(done):
            subprocess.run(["umount", str(place)], check=False)


def try_static(program):
    """Records a disk of this machine in a system of busybox and nothing else."""
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/var/tmp") as scratch:
        root = Path(scratch)
        for directory in ["bin", "proc", "sys", "tmp"]:
            (root / directory).mkdir()
        shutil.copy(shutil.which("busybox"), root / "bin/busybox")
        shutil.copy(program, root / "bin/fathom")
        tracing = root / "sys/kernel/tracing"
        with mounted(("proc", root / "proc"), ("sysfs", root / "sys"), ("tracefs", tracing)):
            shell = ["chroot", root, "/bin/busybox", "sh", "-c"]
            version = run(*shell, "/bin/fathom --version", env=ENVIRONMENT).strip()
            record = "/bin/fathom guest record --seconds 1 --output /tmp/guest.run 2>&1; echo $?"
            said = run(*shell, record, env=ENVIRONMENT).splitlines()
            has_probes = (tracing / "kprobe_events").exists()
    say(f"static, with nothing but busybox: {version}: {said}")
    assert said[0] == "guest: recording", said
    if has_probes:
        assert said[-1] == "0", said
    else:
        assert "this kernel has no kprobes" in said[1], said


if __name__ == "__main__":
    main()
