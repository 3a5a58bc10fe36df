"""What is seen around a load: how much of the CPUs went to programs that are not measured."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

from experiment import Measures, measures

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


def own_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def observed(load: Callable[[], Measures], cpus: set[int], server: int | None = None) -> Measures:
    """What a load measures, which has ended by then; the share of the CPUs' time that others took,
    the interrupts of a disk and the kernel's own threads among them; and the server's CPU time
    where the load does not tell it."""
    def sample() -> tuple[float, float, float, float]:
        served = process_seconds(server) if server else 0
        return os.times().elapsed, busy_seconds(cpus), own_seconds(), served
    before = sample()
    measured = load()
    elapsed, busy, ours, served = (b - a for a, b in zip(before, sample()))
    others = max(0.0, busy - ours - served) / (elapsed * len(cpus)) * 100
    if server and "cpu.server" not in measured:
        requests = max(measured["iops"]["samples"], 1)
        measured |= measures({"cpu.server": served / requests * 1e6}, requests)
    return measured | measures({"others": others})
