"""The arithmetic behind the verdicts, and the form of what is left:
python3 -m unittest discover tools/bench"""

import json
import re
import tempfile
import unittest
from argparse import Namespace
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import bars
import experiment
import scrape
import spdk
from cases import BARS, FATHOM, FATHOM_NO_POLL, HOST, QSD, SPDK, Bar, Case, all_cases
from process import Failed

DOCS = Path(__file__).parents[2] / "docs" / "run-directory.md"
BAR = Bar("c", "text", "iops", QSD, 1, 2)


def cells(case: str, figure: str, **rounds: list) -> list[dict]:
    """Of each who a figure by round, None where it failed."""
    def measures(value) -> list[dict]:
        return [] if value is None else list(experiment.measures({figure: value}).values())
    return [{"settings": {"case": case, "who": who}, "round": turn, "measures": measures(value)}
            for who, values in rounds.items() for turn, value in enumerate(values, 1)]


class Ratios(unittest.TestCase):
    def test_a_ratio_is_taken_within_a_round(self):
        run = cells("c", "iops", fathom=[200, 400, 100], qsd=[100, 100, 50])
        self.assertEqual(bars.ratios(run, BAR), [2, 4, 2])
        self.assertEqual(bars.ratios(run[::-1], BAR)[0], 2)
        self.assertEqual(bars.judge(BAR, run),
                         ["text", "1", "2", "2.000", "2.000 to 4.000", "aim"])

    def test_a_failed_round_is_left_out(self):
        run = cells("c", "iops", fathom=[None, 300, 100], qsd=[100, 100, None])
        self.assertEqual(bars.ratios(run, BAR), [3])

    def test_what_was_not_measured_gives_no_ratio(self):
        run = cells("c", "cpu.server", fathom=[1], qsd=[1])
        self.assertEqual(bars.ratios(run, BAR), [])
        self.assertEqual(bars.ratios(cells("d", "iops", fathom=[1], qsd=[1]), BAR), [])
        self.assertEqual(len(bars.verdicts([])), 1)


    def test_one_value_of_a_setting_is_compared_with_another(self):
        run = cells("c", "iops", on=[99, None, 60], off=[100, 100, 50], other=[1, 1, 1])
        self.assertEqual(bars.compared(run, {"iops": "IOPS", "x": "X"}, "who", ("on", "off")),
                         [["on, against off", "ratio", "rounds"],
                          ["c: IOPS", "1.095", "0.990 to 1.200"]])


class Scrapes(unittest.TestCase):
    def test_a_page_is_compared_with_sending_it_in_the_same_round(self):
        self.assertEqual(scrape.told("text", 35_300_000, [0.09, 0.3, 0.08], [0.01, 0.1, 0.01]),
                         "text: 90 ms for 35.3 MB (80 to 300), 8.0 times cat")

    def test_what_is_sent_is_counted(self):
        with tempfile.NamedTemporaryFile() as page:
            page.write(bytes(1 << 22))
            page.flush()
            self.assertGreater(scrape.cat(Path(page.name)), 0)

    def test_each_disk_is_one_of_its_own(self):
        with tempfile.TemporaryDirectory() as place:
            text = scrape.config(Path(place), 3).read_text(encoding="utf-8")
        self.assertEqual(re.findall(r"name = '(\w+)'", text), ["d0", "d1", "d2"])


class Verdicts(unittest.TestCase):
    def reached(self, text: str, ours: float, theirs: float) -> str:
        bar = next(b for b in BARS if b.text.startswith(text))
        run = cells(bar.case, bar.figure, **{bar.subject: [ours], bar.against: [theirs]})
        return bars.judge(bar, run)[-1]

    def test_more_iops_and_less_latency_are_better(self):
        self.assertEqual(self.reached("null, depth 128", 460, 100), "yes")
        self.assertEqual(self.reached("null, depth 128", 440, 100), "NO")
        self.assertEqual(self.reached("null, depth 1: p50", 5, 10), "yes")
        self.assertEqual(self.reached("null, depth 1: p50", 6, 10), "NO")

    def test_less_time_is_better(self):
        self.assertEqual(self.reached("img convert, raw", 0.7, 1), "yes")
        self.assertEqual(self.reached("img convert, raw", 0.9, 1), "NO")

    def test_every_bar_belongs_to_a_case_that_measures_its_subjects(self):
        cases = {c.name: c for c in all_cases()}
        self.assertEqual(len(cases), len(all_cases()))
        for bar in BARS:
            self.assertLessEqual({bar.subject, bar.against}, set(cases[bar.case].subjects))
            self.assertIn(bar.figure, experiment.FIGURES)

    def test_only_the_case_that_needs_it_is_run_without_polling(self):
        self.assertIn(FATHOM_NO_POLL, Case("disk", "randread", "4k", 32).subjects)
        self.assertNotIn(FATHOM_NO_POLL, Case("disk", "randread", "4k", 128).subjects)
        self.assertNotIn(HOST, Case("null", "randread", "4k", 1).subjects)

    def test_spdk_has_the_raw_disks_of_virtual_machines(self):
        having = {case.name for case in all_cases() if SPDK in case.subjects}
        self.assertLessEqual({"null-randread-4k-1-poll", "disk-read-256k-32", "shm-randwrite-4k-1"},
                             having)
        self.assertEqual([name for name in having if re.search("nbd|img|qcow2|qed|1ms", name)], [])


class Spdk(unittest.TestCase):
    def test_a_file_or_nothing_is_a_controllers_disk(self):
        for disk, method, params in (
                (1 << 20, "bdev_null_create", {"num_blocks": 2048}),
                (Path("/a"), "bdev_aio_create", {"filename": "/a"})):
            bdev, vhost = spdk.config(disk, "d.sock")["subsystems"]
            made, served = bdev["config"][0], vhost["config"][0]
            self.assertEqual(made["method"], method)
            self.assertEqual(made["params"], {"name": "disk", "block_size": 512} | params)
            self.assertEqual(served["params"], {"ctrlr": "d.sock", "dev_name": "disk"})

    def test_another_program_is_not_taken_for_it(self):
        for program, problem in (("/nowhere", "no program"), ("true", "not SPDK's vhost")):
            self.assertIn(problem, spdk.problem(program))


class RunDirectory(unittest.TestCase):
    """Read by the program in crates/run, and told to all others by the documentation."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.run = Path(directory.name, "r.run")
        groups = [[{"case": "z", "who": FATHOM}, {"case": "z", "who": QSD}],
                  [{"case": "b", "who": FATHOM}]]
        self.plan = experiment.plan(groups, 2, {"runtime": "1s"})

    def bench(self, measure) -> list[dict]:
        with redirect_stderr(StringIO()):
            args = Namespace(fathom="true", output=self.run)
            return experiment.run(args, {"version": 2}, "name", "about", self.plan,
                                  ("who", {"iops": "IOPS"}), measure)

    def read(self, file: str) -> dict:
        return json.loads((self.run / file).read_text(encoding="utf-8"))

    def documented(self, table: str) -> set[str]:
        """The fields in a table of the documentation."""
        rows = DOCS.read_text(encoding="utf-8").split(f"| {table} | holds |\n|---|---|\n")[1]
        names = (row.split("|")[1] for row in rows.split("\n\n")[0].splitlines())
        return {name for line in names for name in re.findall(r"`(\w+)`", line)}

    def test_it_has_the_fields_that_are_documented(self):
        done = self.bench(lambda _: experiment.measures(dict.fromkeys(experiment.FIGURES, 1.5), 7))
        run, text = self.read("run.json"), DOCS.read_text(encoding="utf-8")
        self.assertEqual((run["version"], run["title"]), (2, "name: about"))
        plan = run["experiment"]
        # The others are those of `fathom lab run --confirm` and `--kvm-host`.
        self.assertEqual(set(plan) | {"confirm", "ended", "kvm_host", "sheet", "trials"},
                         self.documented("field of `experiment`"))
        self.assertEqual(plan["parameters"],
                         {"case": ["z", "b"], "who": [FATHOM, QSD], "runtime": ["1s"]})
        for planned, cell in zip(plan["cells"], done):
            self.assertEqual(cell, self.read(f"cells/{planned['id']}/cell.json"))
            self.assertEqual(planned, {key: cell[key] for key in ("id", "round", "settings")})
            # `words` are for sentences.
            self.assertEqual(set(cell), self.documented("field of `cell.json`") - {"words"})
        fields = text.split("| `measures` |")[1].split("\n")[0]
        units = text.split("A `unit` is ")[1].split("\n\n")[0]
        for measure in done[0]["measures"]:
            self.assertEqual(set(measure) - set(re.findall(r"`(\w+)`", fields)), set())
            self.assertIn(f"`{measure['unit']}`", units)
            self.assertIn(f"`{measure['better']}`", fields)

    def test_another_one_goes_first_in_each_round(self):
        order = [(c["id"], c["settings"]["case"], c["settings"]["who"]) for c in self.plan]
        self.assertEqual(order, [("1-1", "z", FATHOM), ("2-1", "z", QSD), ("3-1", "b", FATHOM),
                                 ("2-2", "z", QSD), ("1-2", "z", FATHOM), ("3-2", "b", FATHOM)])

    def test_an_interrupted_run_has_its_plan_and_what_has_ended(self):
        def measure(_settings):
            there = {file.parent.name for file in self.run.rglob("cell.json")}
            self.assertEqual(there, {cell["id"] for cell in self.plan[:len(there)]})
            if len(there) == 3:
                raise KeyboardInterrupt
            return {}
        self.assertRaises(KeyboardInterrupt, self.bench, measure)
        files = {str(file.relative_to(self.run)) for file in self.run.rglob("*.json*")}
        ended = {f"cells/{cell['id']}/cell.json" for cell in self.plan[:3]}
        self.assertEqual(files, {"run.json"} | ended)

    def test_a_cell_that_failed_says_why_and_the_next_is_run(self):
        def measure(settings):
            if settings["who"] == QSD:
                raise Failed("it did not start")
            return experiment.measures({"iops": 1})
        done = self.bench(measure)
        self.assertEqual([cell["problems"] for cell in done[:3]],
                         [[], ["z, qsd: it did not start"], []])
        self.assertEqual([len(cell["measures"]) for cell in done[:3]], [1, 0, 1])


if __name__ == "__main__":
    unittest.main()
