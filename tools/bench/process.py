"""Programs that are measured, and programs that measure."""

import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

START_LIMIT = 60  # seconds


class Failed(Exception):
    """A measurement that gave no figure; the text says why."""


def pinned(cpu: int | None, command: list) -> list[str]:
    words = [str(word) for word in command]
    return words if cpu is None else ["taskset", "-c", str(cpu), *words]


def run(command: list, limit: float, cpu: int | None = None) -> str:
    """The command's output; one that hangs or fails is a failure."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(pinned(cpu, command), capture_output=True, text=True, timeout=limit,
                              check=False)
    except subprocess.TimeoutExpired as e:
        raise Failed(f"{name} did not end") from e
    if done.returncode != 0:
        raise Failed(last_line(done.stderr) or f"{name} failed")
    return done.stdout


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def is_listening(socket: Path) -> bool:
    """By the kernel's table: connecting would be a front-end of its own."""
    accepting = 0x10000  # __SO_ACCEPTCON
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        next(table)
        for line in table:
            fields = line.split()
            if fields[-1] == str(socket) and int(fields[3], 16) & accepting:
                return True
    return False


@contextmanager
def running(command: list, socket: Path, cpu: int | None):
    """A server for as long as the block lasts; gives its process id."""
    socket.unlink(missing_ok=True)
    log = socket.with_suffix(".log")
    with open(log, "w", encoding="utf-8") as output:
        server = subprocess.Popen(pinned(cpu, command), stdout=output, stderr=output)
    try:
        end = time.monotonic() + START_LIMIT
        while not is_listening(socket):
            if server.poll() is not None or time.monotonic() > end:
                said = last_line(log.read_text(encoding="utf-8"))
                raise Failed(f"{Path(command[0]).name}: {said}")
            time.sleep(0.01)
        yield server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
