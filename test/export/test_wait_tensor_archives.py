# Owner(s): ["oncall: export"]

"""Exported programs with waits: saved by stock torch, by the patched one, and read by both."""

import sys
import tempfile
from pathlib import Path

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from lazy_process_group import lazy_group, pending
from stock_torch import require_patched, run_stock
from wait_tensor_programs import initial, PROGRAMS


# The ones that return more than a gradient to check.
NAMES = ["A", "B", "C", "E", "F", "G", "K", "L", "N"]
DIALECTS = ["training", "decomposed"]


class Run(torch.nn.Module):
    def __init__(self, name: str, group: str):
        super().__init__()
        self.name, self.group = name, group

    def forward(self, x):
        return PROGRAMS[self.name].fn(x, self.group)


def save(name: str, dialect: str, group: str, directory: str) -> None:
    program = torch.export.export(Run(name, group), (initial(0),))
    if dialect == "decomposed":
        program = program.run_decompositions()
    torch.export.save(program, f"{directory}/{name}_{dialect}.pt2")


def save_all(directory: str) -> None:
    with lazy_group(allow_pending=True) as group:
        for name in NAMES:
            for dialect in DIALECTS:
                save(name, dialect, group, directory)


class TestArchives(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        group = lazy_group()
        self.group = group.__enter__()
        self.addCleanup(group.__exit__, None, None, None)

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.stock = scratch.name
        run_stock(__file__, "--save", cls.stock)

    def check(self, name, fn):
        program = PROGRAMS[name]
        x = program.make_input(0, self.group).detach()
        self.assertEqual(fn(x), program.expected([initial(0)], 0))
        self.assertEqual(x, initial(0))
        self.assertEqual(pending(), 0)

    @parametrize("name", NAMES)
    @parametrize("dialect", DIALECTS)
    def test_saved_by_stock(self, name, dialect):
        program = torch.export.load(f"{self.stock}/{name}_{dialect}.pt2")
        self.assertNotIn("c10d_functional.wait_tensor.default", program.graph_module.code)
        self.check(name, program.module())
        self.check(name, torch.compile(program.module(), fullgraph=True))
        self.check(name, program.run_decompositions().module())

    @parametrize("name", NAMES)
    @parametrize("dialect", DIALECTS)
    def test_saved_by_patched(self, name, dialect):
        with tempfile.TemporaryDirectory() as scratch:
            save(name, dialect, self.group, scratch)
            program = torch.export.load(f"{scratch}/{name}_{dialect}.pt2")
        self.check(name, program.module())
        self.check(name, torch.compile(program.module(), fullgraph=True))

    def test_stock_refuses_what_it_does_not_know(self):
        with tempfile.TemporaryDirectory() as scratch:
            save("B", "decomposed", self.group, scratch)
            with self.assertRaisesRegex(
                RuntimeError, "resolve torch.ops._c10d_functional._wait_tensor_functional"
            ):
                load = f"import torch; torch.export.load('{scratch}/B_decomposed.pt2')"
                run_stock("-c", load)


instantiate_parametrized_tests(TestArchives)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save_all(sys.argv[2])
    else:
        require_patched()
        run_tests()
