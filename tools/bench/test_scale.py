"""The pure parts of tools/bench/scale.py."""

import tomllib
import unittest
from pathlib import Path

import curve
import scale
from curve import Point
from served import Disk, Setup, configuration


def point(n: int, rate: float, server: float = 0.5, load: float = 0.5, busy: float = 1.0, **more) -> Point:
    return Point(**{"n": n, "rate": rate, "server": server, "load": load, "busy": busy, "threads": n, "loaders": n,
                    "factor": n} | more)


class Curves(unittest.TestCase):
    def test_efficiency_is_the_speed_up_in_parts_of_the_best_one(self):
        found = curve.rows([point(1, 100), point(2, 190), point(4, 200)], 8)
        self.assertEqual([one["speed_up"] for one in found], [1.0, 1.9, 2.0])
        self.assertEqual([one["efficiency"] for one in found], [1.0, 0.95, 0.5])

    def test_more_idle_disks_should_change_nothing(self):
        found = curve.rows([point(0, 100, factor=1), point(1000, 80, factor=1)], 2)
        self.assertEqual([one["efficiency"] for one in found], [1.0, 0.8])

    def test_a_load_that_did_nothing_divides_by_nothing(self):
        found = curve.rows([point(1, 0), point(2, 0)], 2)
        self.assertEqual([one["efficiency"] for one in found], [0.0, 0.0])

    def test_the_limiter_is_what_has_no_time_left(self):
        first = point(1, 100, server=0.5)
        for seen, word in (
                (point(2, 380, server=1.9, load=1.9, busy=4), "server threads"),
                (point(2, 200, server=1.0, load=1.9), "load"),
                (point(4, 300, server=1.5, load=2.1, busy=3.9), "CPUs of the machine, which server and load share"),
                (point(4, 200, server=1.0, load=1.0, busy=3.9),
                 "CPUs of the machine, of which other programs take 1.9"),
                (point(2, 200, server=1.0, load=1.0), "waiting: neither server (1.0 CPUs) nor load (1.0) is busy")):
            self.assertEqual(curve.limiter(seen, first, 4), word)

    def test_requests_that_become_dearer_are_named(self):
        first = point(1, 100, server=1.0)
        self.assertEqual(curve.limiter(point(4, 200, server=4.0), first, 8),
                         "server threads; a request costs 2.0 times the CPU")

    def test_a_table_has_a_line_for_each_point(self):
        table = curve.aligned(curve.lines("queues", curve.rows([point(1, 1e6), point(2, 1.9e6)], 8)))
        self.assertEqual([line.split()[:4] for line in table.splitlines()],
                         [["queues", "requests/s", "speed-up", "efficiency"], ["1", "1,000,000", "1.00", "100%"],
                          ["2", "1,900,000", "1.90", "95%"]])


class Cpus(unittest.TestCase):
    def test_steps_double_and_end_with_all(self):
        self.assertEqual([curve.steps(n) for n in (1, 2, 3, 8, 96)],
                         [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64, 96]])

    def test_each_core_has_one_thread_before_any_has_two(self):
        siblings = {0: [0, 4], 4: [0, 4], 1: [1, 5], 5: [1, 5], 2: [2, 6], 6: [2, 6], 3: [3, 7], 7: [3, 7]}
        self.assertEqual(curve.by_cores(list(range(8)), siblings), [0, 1, 2, 3, 4, 5, 6, 7])
        pairs = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
        self.assertEqual(curve.by_cores([0, 1, 2, 3], pairs), [0, 2, 1, 3])
        # The other thread of a core may belong to others.
        self.assertEqual(curve.by_cores([1, 2, 3], pairs), [1, 2, 3])

    def test_server_and_load_have_different_cpus_while_there_are_enough(self):
        self.assertEqual(curve.split([0, 2, 1, 3], 2, 2), ([0, 2], [1, 3]))
        self.assertIsNone(curve.split([0, 1], 2, 1))
        self.assertEqual(scale.Machine([0, 2, 1, 3]).split(1, 2), ({"cpus": "0"}, ["--cpus", "2,1"]))
        self.assertEqual(scale.Machine([0]).split(1, 1), ({}, []))


class Lengths(unittest.TestCase):
    def test_the_whole_run_keeps_its_time(self):
        for cpus in (1, 2, 8, 64, 192):
            how = scale.sizes(10, False, cpus)
            self.assertLessEqual(how.points() * (how.seconds + scale.BESIDES), 9 * 60 + 1e-6)
            self.assertGreater(how.seconds, 0.5)

    def test_a_short_run_has_all_cases(self):
        how = scale.sizes(10, True, 2)
        self.assertLess(how.seconds * how.points(), 10)
        for case in scale.CASES:
            self.assertTrue(callable(getattr(scale.Scale, case)))


class Configurations(unittest.TestCase):
    def test_it_is_what_the_server_reads(self):
        disks = [Disk("a", "null:1T", {"queues": 2, "cpus": "0,1"}),
                 Disk("b", "null:1T", {"pool": "p", "filters": ["delay:read=10ms"]})]
        text = configuration(Path("/tmp/x"), Setup(disks, {"p": {"threads": 3}}, nbd=True))
        self.assertEqual(tomllib.loads(text), {
            "api": {"socket": "/tmp/x/api"}, "nbd": {"listen": ["unix:/tmp/x/nbd"]}, "pool": {"p": {"threads": 3}},
            "disk": [{"name": "a", "image": "null:1T", "vhost-user": "/tmp/x/a", "queues": 2, "cpus": "0,1"},
                     {"name": "b", "image": "null:1T", "vhost-user": "/tmp/x/b", "pool": "p",
                      "filters": ["delay:read=10ms"]}]})
        self.assertNotIn("nbd", tomllib.loads(configuration(Path("/x"), Setup(disks))))


if __name__ == "__main__":
    unittest.main()
