"""How much of the two CPUs went to programs that are not being measured."""

import os
import resource
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds(cpus: set[int]) -> float:
    """Time that the CPUs did not idle, since boot."""
    total = 0
    with open("/proc/stat", encoding="utf-8") as stat:
        for line in stat:
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                total += user + nice + system + irq + softirq + steal
    return total / TICKS


def process_seconds(pid: int) -> float:
    """CPU time of all threads of a process, also of those that have ended."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = stat.rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / TICKS


def children_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(
        resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


class Noise:
    """Measures from its creation to `percent`; the load has ended by then."""

    def __init__(self, cpus: set[int], server: int | None):
        self.cpus, self.server = cpus, server
        self.start = self._sample()

    def _sample(self) -> tuple[float, float, float]:
        ours = children_seconds()
        if self.server is not None:
            ours += process_seconds(self.server)
        return os.times().elapsed, busy_seconds(self.cpus), ours

    def percent(self) -> float:
        """Share of the two CPUs' time that others took. The interrupts of a
        disk and the kernel's own threads are among them."""
        elapsed, busy, ours = (b - a for a, b in zip(self.start, self._sample()))
        return max(0.0, busy - ours) / (elapsed * len(self.cpus)) * 100
