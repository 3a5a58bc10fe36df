"""Speed-up curves: how much faster a server is with more of something, and what keeps it from being faster still."""

from dataclasses import asdict, dataclass

# A thread that has run for this share of the time has had no time left.
BUSY = 0.9
# The CPUs of a machine are never all seen busy: the kernel's own work is counted late.
ALL_BUSY = 0.95
# What other programs may take of the CPUs before they are named.
DISTURBED = 0.1
# How much dearer a request is before the cost is worth a word.
DEARER = 1.25


@dataclass(frozen=True)
class Point:
    """What was measured with `n` queues, threads, connections or disks. CPU times are in CPUs: seconds a second."""

    n: int
    rate: float  # requests per second
    server: float
    load: float
    busy: float  # of the whole machine
    threads: int  # of the server, that serve the requests
    loaders: int  # threads of the load
    factor: float  # how many times faster than the first point it would be at best

    @property
    def cost(self) -> float:
        """CPU time of the server for a request, in microseconds."""
        return self.server / self.rate * 1e6 if self.rate else 0.0


def limiter(point: Point, first: Point, cpus: int) -> str:
    """What has no time left, in the order in which it would have to be looked at."""
    dearer = point.cost / first.cost if first.cost else 1.0
    cost = f"; a request costs {dearer:.1f} times the CPU" if dearer >= DEARER else ""
    if point.server >= BUSY * point.threads:
        return f"server threads{cost}"
    if point.load >= BUSY * point.loaders:
        return "load"
    if point.busy >= ALL_BUSY * cpus:
        others = point.busy - point.server - point.load
        if others >= DISTURBED * cpus:
            return f"CPUs of the machine, of which other programs take {others:.1f}"
        return f"CPUs of the machine, which server and load share{cost}"
    return f"waiting: neither server ({point.server:.1f} CPUs) nor load ({point.load:.1f}) is busy{cost}"


def rows(points: list[Point], cpus: int) -> list[dict]:
    """Of each point: what was measured, the speed-up against the first, the efficiency, and the limiter."""
    first = points[0]
    found = []
    for point in points:
        speed_up = point.rate / first.rate if first.rate else 0.0
        found.append(asdict(point) | {"speed_up": speed_up, "efficiency": speed_up / point.factor,
                                      "cost_us": point.cost, "limiter": limiter(point, first, cpus)})
    return found


def lines(what: str, found: list[dict]) -> list[list[str]]:
    """Cells of a table; `what` is the heading of `n`."""
    head = [what, "requests/s", "speed-up", "efficiency", "CPU us", "limiter"]
    return [head] + [[str(one["n"]), f"{one['rate']:,.0f}", f"{one['speed_up']:.2f}", f"{one['efficiency']:.0%}",
                      f"{one['cost_us']:.2f}", one["limiter"]] for one in found]


def aligned(table: list[list[str]]) -> str:
    """Right-aligned columns; the last is text."""
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join([*map(str.rjust, line[:-1], widths), line[-1]]) for line in table)


def steps(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    powers = [1 << bit for bit in range(most.bit_length()) if 1 << bit < most]
    return powers + [most]


def split(order: list[int], server: int, load: int) -> tuple[list[int], list[int]] | None:
    """CPUs for the threads of the server and of the load, apart from each other; none if there are too few."""
    if server + load > len(order):
        return None
    return order[:server], order[server:server + load]


def by_cores(cpus: list[int], siblings: dict[int, list[int]]) -> list[int]:
    """The CPUs in an order in which one CPU of each core comes first, then the second CPUs of all cores."""
    def rank(cpu: int) -> tuple[int, int]:
        core = [one for one in siblings.get(cpu, [cpu]) if one in cpus]
        return core.index(cpu), cpu
    return sorted(cpus, key=rank)
