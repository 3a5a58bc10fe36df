"""Ratios, and whether they are those that have to be reached."""

from statistics import median

from cases import BARS, Bar


def ratios(cells: list[dict], bar: Bar) -> list[float]:
    """One ratio per round: what was measured close in time is compared."""
    values = {(cell["settings"]["who"], cell["round"]): measure["value"]
              for cell in cells if cell["settings"]["case"] == bar.case
              for measure in cell["measures"] if measure["name"] == bar.figure}
    return [value / values[bar.against, turn] for (who, turn), value in values.items()
            if who == bar.subject and values.get((bar.against, turn))]


def judge(bar: Bar, cells: list[dict]) -> list[str] | None:
    """A bar's line; None when its case was not measured."""
    values = ratios(cells, bar)
    if not values:
        return None
    ratio = median(values)
    reached = "aim" if bar.met(ratio, bar.aim) else "yes" if bar.met(ratio, bar.need) else "NO"
    return [bar.text, f"{bar.need:.3g}", f"{bar.aim:.3g}", f"{ratio:.3f}",
            f"{min(values):.3f} to {max(values):.3f}", reached]


def verdicts(cells: list[dict]) -> list[list[str]]:
    """Those whose cases were measured, below a heading."""
    lines = [judge(bar, cells) for bar in BARS]
    return [["bar", "need", "aim", "measured", "rounds", "reached"], *filter(None, lines)]


def compared(cells: list[dict], shown: dict[str, str], setting: str,
             pair: tuple[str, str]) -> list[list[str]]:
    """Of each case and figure: with the first value of a setting, against the second; by rounds."""
    lines = [[f"{pair[0]}, against {pair[1]}", "ratio", "rounds"]]
    for case in dict.fromkeys(cell["settings"]["case"] for cell in cells):
        for figure, heading in shown.items():
            values = {(cell["settings"][setting], cell["round"]): found["value"]
                      for cell in cells if cell["settings"]["case"] == case
                      for found in cell["measures"] if found["name"] == figure}
            rounds = [value / values[pair[1], turn] for (one, turn), value in values.items()
                      if one == pair[0] and values.get((pair[1], turn))]
            if rounds:
                lines.append([f"{case}: {heading}", f"{median(rounds):.3f}",
                              f"{min(rounds):.3f} to {max(rounds):.3f}"])
    return lines


def aligned(lines: list[list[str]]) -> str:
    """Columns as wide as needed; the first is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
                     for line in lines)
