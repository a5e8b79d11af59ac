# Owner(s): ["oncall: distributed"]

"""Random programs give the same values in every way to run them, with results that come late.

``WAIT_TENSOR_PROGRAMS=10000`` draws more of them, ``WAIT_TENSOR_COMPILED=10000`` gives more of
them to Inductor, which is what takes the time.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parent))
from stock_torch import require_patched
from wait_tensor_found_programs import FOUND
from wait_tensor_random_programs import draw, genes, Program, program, shrink
from wait_tensor_random_ways import batches, difference, Outcome, reference, run, WAYS


PROGRAMS = int(os.environ.get("WAIT_TENSOR_PROGRAMS", 300))
# A kernel takes g++ a second, and a program has two.
COMPILED = int(os.environ.get("WAIT_TENSOR_COMPILED", 30))
BATCH = 30


def fails(program: Program, way: str) -> str:
    return difference(run([program], WAYS[way])[0], reference([program])[0])


def smallest(program: Program, way: str) -> Program:
    """The smallest program made from this one that goes wrong in this way."""
    return draw(shrink(program.genes, lambda g: bool(fails(draw(g, program.grad), way))), program.grad)


class TestRandomPrograms(TestCase):
    @parametrize("way", WAYS)
    def test_programs(self, way):
        count = COMPILED if WAYS[way].backend == "inductor" else PROGRAMS
        for batch in batches(map(program, range(count)), BATCH):
            expected = reference(batch)
            for p, actual, e in zip(batch, run(batch, WAYS[way]), expected):
                if wrong := difference(actual, e):
                    small = smallest(p, way) if fails(p, way) else p
                    self.fail(f"{way}: {wrong}\n{small.source}\ninputs in flight: {small.flying}\ndtype: {p.dtype}")

    @parametrize("name", FOUND)
    @parametrize("way", WAYS)
    def test_found(self, way, name):
        self.assertEqual(fails(FOUND[name], way), "")

    def test_programs_are_what_they_were(self):
        # The figures of benchmarks/random_programs.py are about these.
        sources = "".join(program(seed).source for seed in range(100))
        digest = hashlib.sha256(sources.encode()).hexdigest()[:16]
        self.assertEqual(digest, "0aca82bc3c2aacf8", "the generator draws other programs: measure again")

    def test_a_stale_read_is_seen(self):
        source = """\
def program(x0):
    t0 = c10d.all_reduce(x0, "sum", A)
    t1 = t0 + 1
    c10d.wait_tensor(t0)
    return [t1]
"""
        wrong = Program([], source, [False], False, torch.float64, frozenset())
        self.assertIn("stale read", fails(wrong, "aot_eager"))
        # Inductor fuses the read with the copy that the collective is given.
        self.assertIn("wrong values", fails(wrong, "inductor"))
        self.assertIn("early read: aten.add", fails(wrong, "eager"))

    def test_a_leaked_work_is_seen(self):
        source = "def program(x0):\n    c10d.all_reduce(x0, 'sum', A)\n    return [x0 + 1]\n"
        leak = Program([], source, [False], False, torch.float64, frozenset())
        outcome = run([leak], WAYS["eager"])[0]
        self.assertIn("never waited for", outcome.error)

    def test_a_program_that_fails_is_told_from_its_batch(self):
        good = [program(seed) for seed in (0, 1, 3, 4)]
        bad = Program([], "def program(x0):\n    raise ValueError('mine')\n", [False], False, torch.float64, frozenset())
        outcomes = run([*good[:3], bad, good[3]], WAYS["eager"])
        self.assertEqual([bool(o.error) for o in outcomes], [False, False, False, True, False])
        self.assertIn("mine", outcomes[3].error)

    def test_wrong_values_are_seen(self):
        x = torch.ones(2)
        same = Outcome([x, None])
        self.assertEqual(difference(Outcome([x.clone(), None]), same), "")
        self.assertIn("wrong values", difference(Outcome([x + 1e-6, None]), same))
        self.assertIn("poison", difference(Outcome([x * torch.nan, None]), same))
        self.assertIn("missing", difference(Outcome([None, None]), same))
        self.assertIn("int64", difference(Outcome([x.long(), None]), same))

    def test_shrinking_keeps_what_fails(self):
        def has_a_wait_on_a_view(g):
            return "wait on a view" in draw(g).kinds

        first = next(g for g in map(genes, range(1000)) if has_a_wait_on_a_view(g))
        small = shrink(first, has_a_wait_on_a_view)
        self.assertTrue(has_a_wait_on_a_view(small))
        self.assertLess(len(small), len(first))


instantiate_parametrized_tests(TestRandomPrograms)

if __name__ == "__main__":
    require_patched()
    run_tests()
