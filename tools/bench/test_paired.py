"""The statistics of tools/bench/compare.py, against their definitions."""

import itertools
import math
import random
import unittest

import compare
import paired
from experiment import FIGURES, measures


def by_definition(differences: list[float]) -> float:
    measured = abs(sum(differences))
    choices = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * one for sign, one in zip(signs, differences))) for signs in choices]
    return sum(one >= measured - 1e-9 for one in sums) / len(sums)


class SignFlip(unittest.TestCase):
    def test_it_counts_all_choices_of_signs(self):
        chance = random.Random(1)
        for rounds in range(1, 11):
            differences = [chance.gauss(0.3, 1) for _ in range(rounds)]
            self.assertAlmostEqual(paired.sign_flip(differences), by_definition(differences))

    def test_equal_differences_count_as_equal(self):
        for differences in ([0.1] * 9, [0.1, 0.2, 0.3, -0.1], [0.0, 0.0], [0.5, -0.5]):
            self.assertAlmostEqual(paired.sign_flip(differences), by_definition(differences))

    def test_rounds_that_all_agree_have_the_least_p_value(self):
        for rounds in (1, 2, 9, 25):
            self.assertEqual(paired.sign_flip([0.01 * n + 0.01 for n in range(rounds)]), 2 ** (1 - rounds))

    def test_it_does_not_depend_on_direction_or_scale(self):
        differences = [0.3, -0.1, 0.2, 0.25, -0.05]
        p = paired.sign_flip(differences)
        self.assertEqual(paired.sign_flip([-one for one in differences]), p)
        self.assertEqual(paired.sign_flip([8 * one for one in differences]), p)

    def test_equal_programs_are_seldom_called_different(self):
        chance, called = random.Random(2), 0
        for _ in range(400):
            called += paired.sign_flip([chance.gauss(0, 0.02) for _ in range(10)]) <= 0.05
        self.assertLessEqual(called, 36)  # 20 are expected

    def test_more_rounds_than_the_test_can_count_are_refused(self):
        with self.assertRaises(ValueError):
            paired.sign_flip([0.1] * (paired.MAX_ROUNDS + 1))


class Holm(unittest.TestCase):
    def test_the_least_p_value_meets_the_strictest_level(self):
        self.assertEqual(paired.holm([0.01, 0.04, 0.03, 0.005]), [True, False, False, True])
        self.assertEqual(paired.holm([0.02, 0.02, 0.02]), [False, False, False])
        self.assertEqual(paired.holm([0.05]), [True])
        self.assertEqual(paired.holm([]), [])

    def test_a_later_one_is_kept_after_one_that_is_not_rejected(self):
        # 0.03 alone would be below its own level of 0.05.
        self.assertEqual(paired.holm([0.03, 0.026]), [False, False])


class Rounds(unittest.TestCase):
    def test_the_needed_rounds_are_the_fewest_with_which_a_case_can_be_told(self):
        for cases in (1, 2, 12, 14, 30):
            needed = paired.rounds_needed(cases)
            self.assertLessEqual(2.0 ** (1 - needed), paired.ALPHA / cases)
            self.assertGreater(2.0 ** (2 - needed), paired.ALPHA / cases)

    def test_a_wider_spread_takes_more_rounds(self):
        few = paired.rounds_to_see([0.01, -0.01, 0.02, 0.0], 1.02, 10)
        many = paired.rounds_to_see([0.1, -0.1, 0.2, 0.0], 1.02, 10)
        self.assertEqual(few, paired.rounds_needed(10))
        self.assertGreater(many, 10 * few)


class Interval(unittest.TestCase):
    def test_it_holds_the_shifts_that_are_not_rejected(self):
        chance = random.Random(3)
        differences = [chance.gauss(0.05, 0.02) for _ in range(12)]
        low, high = paired.interval(differences)
        self.assertLess(min(differences), low)
        self.assertLess(low, sum(differences) / 12)
        self.assertLess(high, max(differences))
        for inside in (low + 1e-4, (low + high) / 2, high - 1e-4):
            self.assertGreater(paired.sign_flip([one - inside for one in differences]), 0.05)
        for outside in (low - 1e-3, high + 1e-3):
            self.assertLessEqual(paired.sign_flip([one - outside for one in differences]), 0.05)

    def test_too_few_rounds_give_no_ends(self):
        self.assertEqual(paired.interval([0.1] * 5), (-math.inf, math.inf))


class Verdicts(unittest.TestCase):
    def test_each_case_is_faster_slower_or_noise(self):
        rounds = 12
        noise = [0.01 * (-1) ** n for n in range(rounds)]
        found = paired.verdicts({"a": [0.1 + one for one in noise], "b": noise,
                                 "c": [-0.2 + one for one in noise]})
        self.assertEqual([one.word for one in found], ["faster", "noise", "slower"])
        self.assertAlmostEqual(found[0].speed, math.exp(0.1), places=6)
        self.assertTrue(found[1].low < 1 < found[1].high)
        self.assertTrue(found[2].high < 1)

    def test_missing_rounds_are_counted(self):
        needed = paired.rounds_needed(2)
        found = paired.verdicts({"a": [0.1] * (needed - 2), "b": [0.1] * needed})
        self.assertEqual([one.word for one in found], ["not enough rounds: 2 more", "faster"])

    def test_a_case_that_always_failed_has_no_verdict(self):
        self.assertEqual([one.name for one in paired.verdicts({"a": [], "b": [0.1]})], ["b"])
        self.assertEqual(paired.verdicts({}), [])


def cells(case: str, figure: str, **rounds: list) -> list[dict]:
    """Of each program a figure by round, None where it failed."""
    def told(value) -> list[dict]:
        return [] if value is None else list(measures({figure: value}).values())
    return [{"settings": {"case": case, "program": program}, "round": turn, "measures": told(value)}
            for program, values in rounds.items() for turn, value in enumerate(values, 1)]


class Compared(unittest.TestCase):
    def test_differences_are_taken_within_a_round(self):
        found = compare.differences(cells("c", "iops", old=[100, 50, 10], new=[200, 50, 5]), "c", "iops")
        self.assertEqual([round(math.exp(one), 6) for one in found], [2, 1, 0.5])

    def test_less_latency_is_faster(self):
        found = compare.differences(cells("c", "latency.p50", old=[20], new=[10]), "c", "latency.p50")
        self.assertAlmostEqual(found[0], math.log(2))

    def test_a_failed_round_is_left_out(self):
        run = cells("c", "iops", old=[None, 100, 100], new=[100, None, 50])
        self.assertEqual(compare.differences(run, "c", "iops"), [math.log(0.5)])
        self.assertEqual(compare.differences(run, "d", "iops"), [])

    def test_each_case_is_compared_once_by_a_figure_that_has_a_direction(self):
        names = [case.name for case, _ in compare.CASES]
        self.assertEqual(len(set(names)), len(names))
        for _, figure in compare.CASES:
            self.assertIn(FIGURES[figure][1], ("higher", "lower"))
            self.assertIn(figure, compare.SHOWN)

    def test_twenty_minutes_have_the_rounds_that_all_cases_need(self):
        cases = len(compare.CASES)
        rounds = compare.rounds_in(20, cases, 1)
        self.assertGreaterEqual(rounds, paired.rounds_needed(cases) + 5)
        self.assertLessEqual(rounds, paired.MAX_ROUNDS)
        self.assertEqual(compare.rounds_in(0.1, cases, 1), 1)
        self.assertEqual(compare.rounds_in(1000, cases, 1), paired.MAX_ROUNDS)

    def test_the_table_says_what_is_known(self):
        text = compare.told(paired.verdicts({"a": [0.1] * 12, "b": [0.1]}))
        self.assertEqual([line.split()[-1] for line in text.splitlines()], ["verdict", "faster", "more"])


if __name__ == "__main__":
    unittest.main()
