"""Medians, intervals, ratios and verdicts of an experiment's report, computed again from its cells.

Reads the JSON report of one run, or of two compared, on standard input. Tests are permutation tests
by every exchange there is. An interval is where the test, with the values shifted, excludes nothing.
"""

import functools
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict

LEVEL = 0.05


def interval(values):
    """Ends are the outermost values that as few coins leave out as is rare."""
    if len(values) < 2:
        return None
    values, n = sorted(values), len(values)
    rare = [out for out in range(n) if sum(math.comb(n, k) for k in range(out + 1)) / 2**n <= 0.025]
    out = max(rare, default=0) if n >= 6 else 0
    return [values[out], values[n - 1 - out]]


def logarithms(values):
    """In units of 1e-9, as whole numbers, so that equal ratios are equal."""
    return [round(math.log(value) * 1e9) for value in values]


def ranks(values):
    """Twice the rank; equal values share theirs."""
    ordered = sorted(values)
    return [2 * ordered.index(value) + ordered.count(value) + 1 for value in values]


@functools.cache
def sums_of_exchanged_pairs(parts):
    return [sum(itertools.compress(parts, kept))
            for kept in itertools.product([False, True], repeat=len(parts))]


@functools.cache
def sums_of_exchanged_runs(parts, count):
    return [sum(chosen) for chosen in itertools.combinations(parts, count)]


def two_sided(sums, observed):
    low = sum(one <= observed for one in sums)
    high = sum(one >= observed for one in sums)
    return min(1, 2 * min(low, high) / len(sums))


def of_pairs(differences):
    """The probability, and the smallest that as many pairs can have."""
    differing = [one for one in differences if abs(one) > 1]
    parts = ranks([abs(one) for one in differing])
    observed = sum(part for part, one in zip(parts, differing) if one > 0)
    p = two_sided(sums_of_exchanged_pairs(tuple(sorted(parts))), observed)
    return p, min(1, 2 / 2 ** len(differences))


def of_runs(of, to):
    parts = ranks(of + to)
    p = two_sided(sums_of_exchanged_runs(tuple(sorted(parts)), len(of)), sum(parts[:len(of)]))
    return p, min(1, 2 / math.comb(len(parts), len(of)))


def not_excluded(shifts, test, otherwise):
    """The least and the greatest of the shifts next to which the test excludes nothing."""
    if test(0)[1] > LEVEL:
        return otherwise
    kept = [shift for shift in shifts
            if any(test(shift + beside)[0] > LEVEL for beside in (-0.25, 0.25))]
    # If all values are equal, a shift of any size separates them.
    kept = kept or [shift for shift in shifts if test(shift)[0] > LEVEL]
    return [math.exp(min(kept) * 1e-9), math.exp(max(kept) * 1e-9)]


def interval_of_pairs(differences, ratios):
    means = {(a + b) / 2 for a in differences for b in differences}
    test = lambda shift: of_pairs([one - shift for one in differences])
    return not_excluded(means, test, interval(ratios) if len(ratios) > 1 else None)


def interval_of_runs(of, to, values):
    if min(len(of), len(to)) < 2:
        otherwise = None
    else:
        otherwise = [min(values[0]) / max(values[1]), max(values[0]) / min(values[1])]
    shifts = {a - b for a in of for b in to}
    test = lambda shift: of_runs([one - shift for one in of], to)
    return not_excluded(shifts, test, otherwise)


def close(told, found, what, error=1e-9):
    if found is None or told is None:
        assert told == found, f"{what}: {told}, not {found}"
    elif isinstance(found, list):
        for a, b in zip(told, found, strict=True):
            close(a, b, what, error)
    else:
        assert abs(told - found) <= error * abs(found), f"{what}: {told}, not {found}"


def check_ratio(ratio, median, found, p, what):
    close(ratio["median"], median, what)
    if found:
        found = [min(found[0], median), max(found[1], median)]
    # Logarithms are whole numbers of 1e-9, and ties may be on either side.
    close(ratio["interval"], found, what + " interval", 1e-8)
    close(ratio["p"], p, what + " p")


def check_pairs(ratio, values, to, what):
    """Returns a comparison for `check_verdicts`."""
    pairs = [(values[round], to[round]) for round in sorted(values) if round in to]
    ratios = [of / to for of, to in pairs]
    differences = [a - b for a, b in (logarithms(pair) for pair in pairs)]
    p, least = of_pairs(differences)
    # The geometric mean of the two in the middle, if there are two.
    median = math.sqrt(statistics.median_low(ratios) * statistics.median_high(ratios))
    check_ratio(ratio, median, interval_of_pairs(differences, ratios), p, what)
    return ratio, p, least, lambda more: 2 / 2 ** (len(pairs) + more)


def check_verdicts(family, better, what):
    """Holm's method: tests in the order of their probabilities end with the first that fails."""
    count, shown = len(family), True
    for place, (ratio, p, least, with_more) in enumerate(sorted(family, key=lambda one: one[1])):
        shown = shown and p * (count - place) <= LEVEL
        if shown:
            is_better = (ratio["median"] > 1) == (better == "higher")
            expected = {"state": "better" if is_better else "worse"}
        elif least * count > LEVEL:
            more = next(more for more in itertools.count(1) if with_more(more) * count <= LEVEL)
            expected = {"state": "not_enough_rounds", "more": more}
        else:
            expected = {"state": "no_difference_shown"}
        assert ratio["verdict"] == expected, f"{what}: {ratio}, not {expected}"


def by_round(table, point, name):
    return {
        cell["round"]: cell["measures"][name]
        for cell in table["cells"]
        if name in cell["measures"]
        and all(cell["settings"][axis] == value for axis, value in point["settings"].items())
    }


def check_table(table):
    checked = 0
    families = defaultdict(list)
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
                families[name].append(check_pairs(figure["ratio"], values, to, what))
            checked += 1
    check_families(families, table["measures"])
    return checked + check_rankings(table, table["points"][0])


def check_families(families, measures):
    better = {measure["name"]: measure["better"] for measure in measures}
    for name, family in families.items():
        check_verdicts(family, better[name], name)


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
            check_pairs(effect["ratio"], values, to, what)
            is_shown = effect["ratio"]["verdict"]["state"] in ("better", "worse")
            places.append((not is_shown, -abs(math.log(effect["ratio"]["median"]))))
            checked += 1
        assert places == sorted(places), f"{ranking['measure']}: {places}"
    return checked


def check_comparison(comparison):
    checked = 0
    families = defaultdict(list)
    a, b = (table for _, table in comparison["runs"])
    for point in comparison["points"]:
        for name, pair in point["measures"].items():
            if pair["ratio"]:
                to = list(by_round(a, point, name).values())
                of = list(by_round(b, point, name).values())
                median = statistics.median(of) / statistics.median(to)
                what = f"{point['settings']} {name} B/A"
                logs = logarithms(of), logarithms(to)
                p, least = of_runs(*logs)
                check_ratio(pair["ratio"], median, interval_of_runs(*logs, (of, to)), p, what)
                rounds = len(of), len(to)
                with_more = lambda more, rounds=rounds: 2 / math.comb(
                    sum(rounds) + 2 * more, rounds[0] + more)
                families[name].append((pair["ratio"], p, least, with_more))
                checked += 1
    check_families(families, comparison["measures"])
    return checked + check_table(a) + check_table(b)


report = json.load(sys.stdin)
print(check_comparison(report) if "runs" in report else check_table(report))
