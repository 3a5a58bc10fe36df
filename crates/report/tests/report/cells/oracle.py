"""Medians, intervals and ratios of an experiment's report, computed again from its cells.

Reads the JSON report of one run, or of two compared, on standard input. Intervals are those of the
bootstrap, by drawing every resample there is.
"""

import functools
import itertools
import json
import math
import statistics
import sys
from collections import Counter, defaultdict

TAIL = 0.025


@functools.cache
def chances_of_places(n, middle):
    """How often each place in the order of n values has the median of a resample."""
    counts = Counter()
    for drawn in itertools.combinations_with_replacement(range(n), n):
        # How many orders there are of the same draws.
        ways, left = 1, n
        for times in Counter(drawn).values():
            ways *= math.comb(left, times)
            left -= times
        counts[middle(drawn)] += ways
    return {place: count / n**n for place, count in counts.items()}


def resampled(values, middle):
    """How often each value is the median of a resample."""
    values = sorted(values)
    chances = Counter()
    for place, chance in chances_of_places(len(values), middle).items():
        chances[values[place]] += chance
    return chances


def end(chances, descending):
    total = 0.0
    for value in sorted(chances, reverse=descending):
        total += chances[value]
        if total >= TAIL:
            return value
    raise AssertionError("chances do not add up")


def interval(values):
    if len(values) < 2:
        return None
    if len(values) < 5:
        return [min(values), max(values)]
    low = end(resampled(values, statistics.median_low), False)
    return [low, end(resampled(values, statistics.median_high), True)]


def quotients(of, to):
    chances = defaultdict(float)
    for a, p in of.items():
        for b, q in to.items():
            chances[a / b] += p * q
    return chances


def interval_of_runs(of, to):
    if min(len(of), len(to)) < 2:
        return None
    if min(len(of), len(to)) < 5:
        return [min(of) / max(to), max(of) / min(to)]
    low, high = statistics.median_low, statistics.median_high
    return [
        end(quotients(resampled(of, low), resampled(to, high)), False),
        end(quotients(resampled(of, high), resampled(to, low)), True),
    ]


def close(told, found, what):
    if found is None or told is None:
        assert told == found, f"{what}: {told}, not {found}"
    elif isinstance(found, list):
        for a, b in zip(told, found, strict=True):
            close(a, b, what)
    else:
        assert abs(told - found) <= 1e-9 * abs(found), f"{what}: {told}, not {found}"


def check_ratio(ratio, median, found, what):
    close(ratio["median"], median, what)
    close(ratio["interval"], found, what + " interval")
    noise = None if found is None else found[0] <= 1 <= found[1]
    assert ratio["within_noise"] == noise, f"{what}: {ratio}"


def by_round(table, point, name):
    return {
        cell["round"]: cell["measures"][name]
        for cell in table["cells"]
        if name in cell["measures"]
        and all(cell["settings"][axis] == value for axis, value in point["settings"].items())
    }


def check_table(table):
    checked = 0
    beside = (table.get("beside") or {}).get("parameter")
    for point in table["points"]:
        base = base_of(table, point, beside)
        for name, figure in point["measures"].items():
            values = by_round(table, point, name)
            what = f"{point['settings']} {name}"
            close(figure["median"], statistics.median(values.values()), what)
            close(figure["interval"], interval(list(values.values())), what)
            if figure["ratio"]:
                to = by_round(table, base, name)
                pairs = [values[round] / to[round] for round in values if round in to]
                check_ratio(figure["ratio"], statistics.median(pairs), interval(pairs), what)
            checked += 1
    return checked + check_rankings(table, table["points"][0])


def base_of(table, point, beside):
    if beside not in point["settings"]:
        return table["points"][0]
    alike = lambda one: one["settings"] | {beside: ""} == point["settings"] | {beside: ""}
    return next(one for one in table["points"] if alike(one))


def check_rankings(table, base):
    checked = 0
    for ranking in table["rankings"]:
        to = by_round(table, base, ranking["measure"])
        places = []
        for effect in ranking["effects"]:
            what = f"effect of {effect['setting']}={effect['value']} on {ranking['measure']}"
            assert base["settings"][effect["setting"]] == effect["base"], what
            settings = base["settings"] | {effect["setting"]: effect["value"]}
            values = by_round(table, {"settings": settings}, ranking["measure"])
            pairs = [values[round] / to[round] for round in values if round in to]
            check_ratio(effect["ratio"], statistics.median(pairs), interval(pairs), what)
            noise = effect["ratio"]["within_noise"]
            places.append((noise is True, -abs(math.log(effect["ratio"]["median"]))))
            checked += 1
        assert places == sorted(places), f"{ranking['measure']}: {places}"
    return checked


def check_comparison(comparison):
    checked = 0
    a, b = (table for _, table in comparison["runs"])
    for point in comparison["points"]:
        for name, pair in point["measures"].items():
            if pair["ratio"]:
                to = list(by_round(a, point, name).values())
                of = list(by_round(b, point, name).values())
                median = statistics.median(of) / statistics.median(to)
                what = f"{point['settings']} {name} B/A"
                check_ratio(pair["ratio"], median, interval_of_runs(of, to), what)
                checked += 1
    return checked + check_table(a) + check_table(b)


report = json.load(sys.stdin)
print(check_comparison(report) if "runs" in report else check_table(report))
