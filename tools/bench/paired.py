"""The statistics of paired rounds: both programs measure a case in each round, one after the other.

A round's difference is the logarithm of the ratio of both figures. If the programs are equally fast, each
difference could as well have the other sign. The exact sign-flip permutation test counts, among all choices of
signs, those whose mean differs from zero at least as much as the measured mean. The test needs no assumption about
the distribution of the figures, and rounds are never compared with other rounds.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist, stdev

# Probability that at least one of all cases is called faster or slower although it is not.
ALPHA = 0.05
# Probability that a real difference is found, for the number of rounds that it takes.
POWER = 0.8
# Rounds from which the exact test takes too long: it adds up 2^(n/2) choices of signs.
MAX_ROUNDS = 30


def sums_of_signs(values: list[float]) -> list[float]:
    """The sums of the values with all choices of their signs, sorted."""
    sums = [0.0]
    for value in values:
        sums = [one + value for one in sums] + [one - value for one in sums]
    return sorted(sums)


def sign_flip(differences: list[float]) -> float:
    """The two-sided p-value of the exact test.

    Each choice of signs is a sum of one half of the values and a sum of the other half. For each sum of the first
    half, the sorted second half has the number of sums that reach the measured one.
    """
    if len(differences) > MAX_ROUNDS:
        raise ValueError(f"at most {MAX_ROUNDS} rounds")
    measured = abs(math.fsum(differences))
    # Sums that differ only by rounding are equal.
    least = measured - 1e-9 * math.fsum(map(abs, differences))
    if least <= 0:
        return 1.0
    middle = len(differences) // 2
    first, second = sums_of_signs(differences[:middle]), sums_of_signs(differences[middle:])
    as_large = sum(len(second) - bisect_left(second, least - one) for one in first)
    return min(1.0, 2 * as_large / 2 ** len(differences))


def holm(p_values: list[float], alpha: float = ALPHA) -> list[bool]:
    """Which hypotheses are rejected at the level `alpha` for all of them together (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def rounds_needed(cases: int, alpha: float = ALPHA) -> int:
    """The rounds with which the test can reach the confidence at all: n rounds that all agree have p = 2^(1-n)."""
    return math.ceil(1 + math.log2(cases / alpha))


def interval(differences: list[float], alpha: float = ALPHA) -> tuple[float, float]:
    """The shifts of the differences that the test does not reject, at the level `alpha` for this case alone. Without
    enough rounds for that level, the interval has no ends."""
    if 2.0 ** (1 - len(differences)) > alpha:
        return -math.inf, math.inf
    mean = math.fsum(differences) / len(differences)

    def end(outside: float) -> float:
        inside = mean
        for _ in range(24):
            between = (inside + outside) / 2
            rejects = sign_flip([one - between for one in differences]) <= alpha
            inside, outside = (inside, between) if rejects else (between, outside)
        return inside

    # Beyond the extremes all differences have one sign, which gives the least p-value.
    return end(min(differences)), end(max(differences))


def rounds_to_see(differences: list[float], ratio: float, cases: int) -> int:
    """An estimate of the rounds that show a difference of `ratio`, from the spread of those measured."""
    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - ALPHA / cases / 2) + normal.inv_cdf(POWER)
    spread = stdev(differences) if len(differences) > 1 else 0.0
    return max(rounds_needed(cases), math.ceil((quantiles * spread / math.log(ratio)) ** 2))


@dataclass(frozen=True)
class Verdict:
    """What the rounds say of one case."""

    name: str
    rounds: int
    # New against old, the geometric mean of the rounds; more than 1 is faster.
    speed: float
    low: float
    high: float
    p: float
    word: str  # faster, slower, noise, or how many rounds are missing
    to_see: int  # rounds that a difference of 2% takes


# What a change has to be to be worth a look.
WORTH = 1.02


def verdicts(cases: dict[str, list[float]]) -> list[Verdict]:
    """Of each case with its differences, which are positive when the new program is faster."""
    measured = {name: differences for name, differences in cases.items() if differences}
    needed = rounds_needed(len(measured)) if measured else 0
    p_values = [sign_flip(differences) for differences in measured.values()]
    found = []
    for (name, differences), p, rejected in zip(measured.items(), p_values, holm(p_values)):
        speed, (low, high) = math.fsum(differences) / len(differences), interval(differences)
        if rejected:
            word = "faster" if speed > 0 else "slower"
        elif len(differences) < needed:
            word = f"not enough rounds: {needed - len(differences)} more"
        else:
            word = "noise"
        found.append(Verdict(name, len(differences), math.exp(speed), math.exp(low), math.exp(high), p, word,
                             rounds_to_see(differences, WORTH, len(measured))))
    return found
