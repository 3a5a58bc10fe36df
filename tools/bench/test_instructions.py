"""How tools/bench/instructions.py reads callgrind's files and its own."""

import unittest

import instructions
from instructions import Counted
from process import Failed

# The beginning of a file of callgrind, and its end.
DUMP = """# callgrind format
version: 1
desc: Trigger: --dump-after=counted_instructions
positions: line
events: Ir
summary: 4213

fn=(1) some function
0 4213

totals: 4213
"""


class Files(unittest.TestCase):
    def test_each_call_of_the_function_has_a_total(self):
        end = DUMP.replace("--dump-after=counted_instructions", "Program termination")
        self.assertEqual(instructions.totals([DUMP, DUMP.replace("4213", "7"), end]), [4213, 7])
        with self.assertRaises(Failed):
            instructions.totals(["desc: Trigger: --dump-after=x\n"])

    def test_totals_belong_to_the_printed_paths_in_their_order(self):
        self.assertEqual(instructions.paths("a, b\t1\nc\t32\n", [10, 640]),
                         [Counted("a, b", 1, 10), Counted("c", 32, 640)])
        with self.assertRaises(Failed):
            instructions.paths("a\t1\n", [1, 2])

    def test_what_is_written_is_read_again(self):
        tools, counted = {"rustc": "1.95.0", "libc": "glibc 2.36"}, [Counted("a, b", 32, 99)]
        self.assertEqual(instructions.read(instructions.written(tools, counted)), (tools, counted))

    def test_the_numbers_in_the_repository_are_of_known_tools(self):
        tools, counted = instructions.read(instructions.EXPECTED.read_text(encoding="utf-8"))
        self.assertEqual(set(tools), {"rustc", "libc", "valgrind"})
        self.assertGreaterEqual(len(counted), 10)
        self.assertEqual(len({one.name for one in counted}), len(counted))


class Differences(unittest.TestCase):
    def test_each_change_is_named(self):
        before = [Counted("a", 2, 100), Counted("b", 1, 7), Counted("c", 1, 5)]
        now = [Counted("a", 2, 110), Counted("b", 1, 7), Counted("d", 4, 10)]
        self.assertEqual(instructions.differences(before, now), [
            "c: not counted any more", "a: 50.0 -> 55.0 instructions a request (+10.0%)",
            "d: new, 2.5 instructions a request"])
        self.assertEqual(instructions.differences(now, now), [])


if __name__ == "__main__":
    unittest.main()
