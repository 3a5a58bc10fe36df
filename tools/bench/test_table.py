"""The arithmetic behind the verdicts: python3 -m unittest discover tools/bench"""

import unittest

import table
from cases import BARS, FATHOM, FATHOM_NO_POLL, HOST, QSD, Case, all_cases
from result import Result


def result(iops: float = 100, p50: float = 10, cpu: float | None = 1) -> Result:
    return Result(iops, 1, p50, 20, 1, cpu)


class Ratios(unittest.TestCase):
    def test_a_ratio_is_taken_within_a_round(self):
        rounds = {FATHOM: [result(200), result(400), result(100)],
                  QSD: [result(100), result(100), result(100)]}
        self.assertEqual(table.ratios(rounds, "iops", FATHOM, QSD), [2, 4, 1])
        self.assertEqual(table.ratio_text([2, 4, 1]), "2.00")

    def test_a_failed_round_is_left_out(self):
        rounds = {FATHOM: [None, result(300)], QSD: [result(100), result(100)]}
        self.assertEqual(table.ratios(rounds, "iops", FATHOM, QSD), [3])
        self.assertEqual(table.middle(rounds[FATHOM], "iops"), 300)

    def test_a_figure_that_was_not_measured_gives_no_ratio(self):
        rounds = {FATHOM: [result(cpu=None)], QSD: [result()]}
        self.assertEqual(table.ratios(rounds, "server_cpu_us", FATHOM, QSD), [])


class Verdicts(unittest.TestCase):
    def judge(self, text: str, ours: Result, theirs: Result) -> dict:
        bar = next(b for b in BARS if b.text.startswith(text))
        return table.judge(bar, {bar.case: {bar.subject: [ours], bar.against: [theirs]}})

    def test_more_iops_and_less_latency_are_better(self):
        faster = self.judge("null, depth 128", result(460), result(100))
        self.assertTrue(faster["reached"])
        self.assertFalse(faster["aim_reached"])
        self.assertFalse(self.judge("null, depth 128", result(440), result(100))["reached"])
        quick = self.judge("null, depth 1: p50", result(p50=5), result(p50=10))
        self.assertTrue(quick["reached"])
        self.assertFalse(self.judge("null, depth 1: p50", result(p50=6), result(p50=10))["reached"])

    def test_less_time_is_better(self):
        def took(seconds: float) -> Result:
            return Result(None, 1, None, None, None, seconds=seconds)
        self.assertTrue(self.judge("img convert, raw", took(0.7), took(1))["reached"])
        self.assertFalse(self.judge("img convert, raw", took(0.9), took(1))["reached"])

    def test_what_was_not_measured_is_not_judged(self):
        self.assertEqual(table.bars({}), [])

    def test_every_bar_belongs_to_a_case_that_measures_its_subjects(self):
        cases = {c.name: c for c in all_cases()}
        self.assertEqual(len(cases), len(all_cases()))
        for bar in BARS:
            subjects = cases[bar.case].subjects
            self.assertIn(bar.subject, subjects)
            self.assertIn(bar.against, subjects)

    def test_only_the_case_that_needs_it_is_run_without_polling(self):
        self.assertIn(FATHOM_NO_POLL, Case("disk", "randread", "4k", 32).subjects)
        self.assertNotIn(FATHOM_NO_POLL, Case("disk", "randread", "4k", 128).subjects)
        self.assertNotIn(HOST, Case("null", "randread", "4k", 1).subjects)


if __name__ == "__main__":
    unittest.main()
