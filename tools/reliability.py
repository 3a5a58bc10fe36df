#!/usr/bin/env python3
"""Adds runs of `make torture` to the table in docs/reliability.md: tools/reliability.py

Reads the ledger target/torture.json. A run is known by its date and its seed. Runs that the table already has
stay as they are, since the ledger is not kept. The table stands between two marks. It has one row for each run,
by date, and a last row with the totals.
"""

import datetime
import json
import sys

LEDGER = "target/torture.json"
PAGE = "docs/reliability.md"
BEGIN, END = "<!-- runs -->", "<!-- end of runs -->"

# What the tests count (crates/testing), in the order of the columns.
KINDS = ["requests", "kills", "power-cuts", "storage-errors", "hostile-inputs", "comparisons"]
COLUMNS = ["date", "version", "seed", "min", *(kind.replace("-", " ") for kind in KINDS), "failed"]
SEED = COLUMNS.index("seed")
TOTAL = "total"
# The first column with a total.
FIRST_TOTAL = COLUMNS.index("min")


def row(cells):
    return f"| {' | '.join(cells)} |"


def run_in_ledger(line):
    """The cells of one run. Raises ValueError if the line is not a run of `make torture`."""
    try:
        run = json.loads(line)
        date = datetime.datetime.fromisoformat(run["date"]).astimezone(datetime.timezone.utc)
        tried, failures = run["tried"], len(run["failures"])
        cells = [f"{date:%Y-%m-%d %H:%M:%S}", run["version"], str(run["seed"]), f"{run['minutes']:,.1f}"]
        numbers = [tried.get(kind, 0) for kind in KINDS]
        unknown = sorted(tried.keys() - set(KINDS))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a run of make torture: {error!r}") from error
    if unknown:
        raise ValueError(f"unknown kinds: {', '.join(unknown)}; add them to KINDS")
    return cells + [f"{number:,}" for number in [*numbers, failures]]


def runs_in_ledger():
    with open(LEDGER, encoding="utf-8") as ledger:
        for number, line in enumerate(ledger, 1):
            try:
                yield run_in_ledger(line)
            except ValueError as error:
                sys.exit(f"{LEDGER}:{number}: {error}")


def runs_in_table(table):
    """The cells of the rows between the marks, without the head, the rule below it, and the totals."""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        is_rule = not set(line) - set("|-: ")
        if is_rule or cells == COLUMNS or cells[0] == TOTAL:
            continue
        if len(cells) != len(COLUMNS):
            sys.exit(f"{PAGE}: a row has {len(cells)} cells, not {len(COLUMNS)}: {line}")
        yield cells


def totals(runs):
    columns = list(zip(*runs))[FIRST_TOTAL:] or [()] * len(COLUMNS[FIRST_TOTAL:])
    numbers = [[float(cell.replace(",", "")) for cell in column] for column in columns]
    minutes, *counts = (sum(column) for column in numbers)
    return [TOTAL, *[""] * (FIRST_TOTAL - 1), f"{minutes:,.1f}", *(f"{count:,.0f}" for count in counts)]


def main():
    with open(PAGE, encoding="utf-8") as page:
        text = page.read()
    before, begin, rest = text.partition(f"{BEGIN}\n")
    table, end, after = rest.partition(f"{END}\n")
    if not (begin and end):
        sys.exit(f"{PAGE}: the marks {BEGIN} and {END} are missing")
    try:
        ledger = list(runs_in_ledger())
    except FileNotFoundError:
        sys.exit(f"{LEDGER}: does not exist; run make torture first")
    runs = {(run[0], run[SEED]): run for run in runs_in_table(table)}
    there = len(runs)
    for run in ledger:
        runs.setdefault((run[0], run[SEED]), run)
    rows = [runs[key] for key in sorted(runs)]
    aligned = ["---"] * FIRST_TOTAL + ["--:"] * (len(COLUMNS) - FIRST_TOTAL)
    lines = [row(COLUMNS), f"|{'|'.join(aligned)}|", *map(row, [*rows, totals(rows)])]
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write("\n".join([before + BEGIN, "", *lines, "", END + "\n" + after]))
    print(f"{PAGE}: added {len(runs) - there} of {len(ledger)} runs in the ledger; the table has {len(runs)}")


if __name__ == "__main__":
    main()
