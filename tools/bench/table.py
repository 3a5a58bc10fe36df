"""Medians, ratios and the table."""

from statistics import median

from cases import BARS, FATHOM, HOST, QSD, Bar, Case

# case name -> subject -> one result per round, None where it failed
Rounds = dict[str, dict[str, list]]


def middle(results: list, figure: str) -> float | None:
    values = [getattr(r, figure) for r in results if r is not None]
    values = [v for v in values if v is not None]
    return median(values) if values else None


def ratios(rounds: dict[str, list], figure: str, subject: str, against: str) -> list[float]:
    """One ratio per round: what was measured close in time is compared."""
    pairs = zip(rounds.get(subject, []), rounds.get(against, []))
    values = [(getattr(a, figure), getattr(b, figure)) for a, b in pairs if a and b]
    return [a / b for a, b in values if a is not None and b]


def iops(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ratio_text(values: list[float]) -> str:
    return f"{median(values):.2f}" if values else "-"


HEADER = ["case", "who", "seconds", "CPU s", "IOPS", "MB/s", "p50 us", "p99 us", "server CPU us",
          "load CPU us", "others %", "IOPS/QSD", "IOPS/host"]


def rows(case: Case, rounds: dict[str, list]) -> list[list[str]]:
    lines = []
    for i, subject in enumerate(case.subjects):
        results = rounds.get(subject, [])
        against = []
        for other in (QSD, HOST):
            compare = subject != other and subject != HOST
            values = ratios(rounds, "iops", subject, other) if compare else []
            against.append(ratio_text(values) if values else "")
        p50, p99, server, load = (middle(results, f) for f in (
            "p50_us", "p99_us", "server_cpu_us", "load_cpu_us"))
        lines.append([
            case.name if i == 0 else "", subject,
            *(number(middle(results, figure)) if case.storage == "img" else ""
              for figure in ("seconds", "cpu_seconds")),
            iops(middle(results, "iops")),
            number(middle(results, "mb_per_s"), 0), number(p50), number(p99),
            number(server), number(load), number(middle(results, "others_percent"), 0),
            *against])
    return lines


def align(lines: list[list[str]], left: int) -> str:
    """Columns as wide as needed; the first `left` are left-aligned."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    def one(line: list[str]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w)
                 for i, (c, w) in enumerate(zip(line, widths))]
        return "  ".join(cells).rstrip()
    return "\n".join(one(line) for line in lines)


def measurements(cases: list[Case], rounds: Rounds) -> str:
    lines = [HEADER]
    for case in cases:
        lines += rows(case, rounds.get(case.name, {}))
    return align(lines, 2)


def judge(bar: Bar, rounds: Rounds) -> dict | None:
    """A bar's outcome; None when its case was not measured."""
    values = ratios(rounds.get(bar.case, {}), bar.figure, bar.subject, bar.against)
    if not values:
        return None
    ratio = median(values)
    return {
        "bar": bar.text, "case": bar.case, "need": bar.need, "aim": bar.aim,
        "ratio": ratio, "lowest": min(values), "highest": max(values),
        "reached": bar.met(ratio, bar.need), "aim_reached": bar.met(ratio, bar.aim),
    }


def bars(rounds: Rounds) -> list[dict]:
    outcomes = [judge(bar, rounds) for bar in BARS]
    return [o for o in outcomes if o is not None]


def verdicts(outcomes: list[dict]) -> str:
    lines = [["bar", "need", "aim", "measured", "rounds", "reached"]]
    for o in outcomes:
        reached = "aim" if o["aim_reached"] else "yes" if o["reached"] else "NO"
        lines.append([o["bar"], f"{o['need']:.3g}", f"{o['aim']:.3g}", f"{o['ratio']:.3f}",
                      f"{o['lowest']:.3f} to {o['highest']:.3f}", reached])
    return align(lines, 1)
