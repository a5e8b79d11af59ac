# Owner(s): ["oncall: distributed"]

"""Random functional graphs, run before and after the reinplace pass.

Under the process group whose results appear only when they are waited for. A graph
is correct when it is drawn: it reads data only of tensors that are not in flight. The
pass must keep its values, and what shares memory with what outside; and where it let a
wait copy, putting that wait in place must change one of them.

``WAIT_TENSOR_GRAPHS=20000`` draws more.
"""

import functools
import itertools
import os
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import torch
import torch.fx as fx
from torch._inductor.fx_passes import reinplace
from torch.testing._internal.common_utils import run_tests, TestCase


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import wait_tensor_graphs
from lazy_process_group import lazy_group, pending, reset
from torch.utils._ordered_set import OrderedSet
from wait_tensor_graphs import copied, difference, observe


c10d = torch.ops._c10d_functional
aten = torch.ops.aten
FUNCTIONAL = c10d._wait_tensor_functional.default
SHAPE = (4, 4)
GRAPHS = int(os.environ.get("WAIT_TENSOR_GRAPHS", 2000))

VIEWS: list[Callable[[fx.Graph, fx.Node], fx.Node]] = [
    lambda g, t: g.call_function(aten.t.default, (t,)),
    lambda g, t: g.call_function(aten.slice.Tensor, (t, 0, 1, 3)),
    lambda g, t: g.call_function(aten.slice.Tensor, (t, 1, 0, 2)),
    lambda g, t: g.call_function(aten.unsqueeze.default, (t, 0)),
    lambda g, t: g.call_function(aten.as_strided.default, (t, (2, 2), (4, 1), 1)),
    lambda g, t: g.call_function(aten.view.dtype, (t, torch.int32)),
]


class Draw:
    """Draws one graph. Each tensor knows the memory it lives in, and whether that is in flight."""

    def __init__(self, data: st.DataObject, group: str):
        self.data = data
        self.group = group
        self.graph = fx.Graph()
        self.memory: dict[fx.Node, int] = {}
        self.in_flight: set[int] = set()
        self.fakes = torch._subclasses.FakeTensorMode()
        self.ids = itertools.count()
        self.flying_inputs: list[bool] = []
        # The memories of inputs, or of what a wait can turn into one.
        self.inputs: set[int] = set()

    def draw(self, options):
        return self.data.draw(st.sampled_from(options))

    def add(self, node: fx.Node, memory: int | None = None) -> fx.Node:
        if "val" not in node.meta:
            args, kwargs = torch.utils._pytree.tree_map_only(
                fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs)
            )
            with self.fakes:
                node.meta["val"] = node.target(*args, **kwargs)
        self.memory[node] = next(self.ids) if memory is None else memory
        return node

    def tensors(self, readable: bool, shape=None, dtype=torch.float32) -> list[fx.Node]:
        return [
            n
            for n, memory in self.memory.items()
            if (not readable or memory not in self.in_flight)
            and (shape is None or n.meta["val"].shape == shape)
            and (dtype is None or n.meta["val"].dtype == dtype)
        ]

    def call(self, op, *args, **kwargs) -> fx.Node:
        return self.graph.call_function(op, args, kwargs)

    def input(self) -> None:
        node = self.graph.placeholder(f"x{len(self.flying_inputs)}")
        node.meta["val"] = self.fakes.from_tensor(torch.empty(SHAPE))
        self.add(node)
        self.inputs.add(self.memory[node])
        flying = self.data.draw(st.booleans())
        self.flying_inputs.append(flying)
        if flying:
            self.in_flight.add(self.memory[node])

    def collective(self) -> None:
        if sources := self.updatable(None):
            source = self.draw(sources)
            node = self.add(self.call(c10d.all_reduce.default, source, "sum", self.group))
            self.in_flight.add(self.memory[node])

    def updatable(self, shape) -> list[fx.Node]:
        # Upstream's general rule updates an input in place although the result is
        # read after something else was copied to the input. That is not ours to test.
        return [
            n for n in self.tensors(True, shape) if self.memory[n] not in self.inputs
        ]

    def wait(self) -> None:
        tensor = self.draw(self.tensors(readable=False, dtype=None))
        self.in_flight.discard(self.memory[tensor])
        node = self.add(self.call(FUNCTIONAL, tensor))
        if self.memory[tensor] in self.inputs:
            self.inputs.add(self.memory[node])

    def view(self) -> None:
        base = self.draw(self.tensors(readable=False, shape=SHAPE))
        if base.meta["val"].is_contiguous():
            self.add(self.draw(VIEWS)(self.graph, base), self.memory[base])

    def pointwise(self) -> None:
        if readable := self.tensors(readable=True):
            a = self.draw(readable)
            b = self.draw(self.tensors(True, a.meta["val"].shape))
            self.add(self.call(aten.add.Tensor, a, b))
            self.add(self.call(aten.mul.Tensor, a, 1.5))

    def scatter(self) -> None:
        if bases := self.updatable(SHAPE):
            base = self.draw(bases)
            if sources := self.tensors(True, (2, 4)):
                # Else what is copied to an input may be what the input holds, and a wait
                # that has to copy seems not to.
                source = self.add(self.call(aten.mul.Tensor, self.draw(sources), 0.5))
                self.add(self.call(aten.slice_scatter.default, base, source, 0, 1, 3))

    def index_put(self) -> None:
        if bases := self.updatable(SHAPE):
            index = self.call(aten.arange.default, 2, device="cpu")
            self.add(index)
            values = self.draw(self.tensors(True, (2, 4)) or [None])
            if values is not None:
                # Upstream's general rule updates a tensor in place also where another
                # argument is a view of it, which eager mode refuses.
                values = self.add(self.call(aten.mul.Tensor, values, 0.5))
                self.add(
                    self.call(aten.index_put.default, self.draw(bases), [index], values)
                )

    def finish(self) -> fx.GraphModule:
        inputs = [n for n in self.memory if n.op == "placeholder"]
        # Nothing is left in flight: a program that leaks a Work is not a correct one.
        for node in list(self.memory):
            if self.memory[node] in self.in_flight:
                self.in_flight.discard(self.memory[node])
                self.add(self.call(FUNCTIONAL, node))
        # AOTAutograd copies what a program computed, not an input as it is, and
        # returns no input to which it copies.
        taken = {self.memory[x] for x in inputs}
        sources = [n for n in self.tensors(True, SHAPE) if self.memory[n] not in taken]
        written = set()
        for x in inputs:
            if sources and self.data.draw(st.booleans()):
                written.add(self.memory[x])
                copy = self.call(aten.copy_.default, x, self.draw(sources))
                copy.meta["val"] = x.meta["val"]
        values = [n for n in self.tensors(True) if self.memory[n] not in written]
        outputs = self.data.draw(
            st.lists(st.sampled_from(values), min_size=1, max_size=4)
            if values
            else st.just([])
        )
        self.graph.output(tuple(outputs))
        return fx.GraphModule(torch.nn.Module(), self.graph)


STEPS = [
    Draw.collective,
    Draw.wait,
    Draw.view,
    Draw.pointwise,
    Draw.scatter,
    Draw.index_put,
]


def observed(gm: fx.GraphModule, flying: list[bool], mutated: list[bool], group: str):
    torch.manual_seed(0)
    return observe(gm, [torch.randn(SHAPE) for _ in flying], flying, mutated, group)


class TestRandomGraphs(TestCase):
    def reinplace(self, drawn: Draw, code: fx.GraphModule, but: str | None = None):
        """The graph after the pass, and the waits that copy. ``but`` may not."""
        decide, copying = reinplace._waits_that_must_copy, []

        def decided(graph, waits):
            must_copy = decide(graph, waits)
            copying.extend(node.name for node in must_copy)
            return OrderedSet(n for n in must_copy if n.name != but)

        with unittest.mock.patch.object(reinplace, "_waits_that_must_copy", decided):
            return wait_tensor_graphs.reinplace(copied(code), drawn.fakes), copying

    def check(self, data):
        # What raises below leaves its later waits undone; what fails here may do so, too.
        reset()
        drawn = Draw(data, self.group)
        for _ in range(data.draw(st.integers(1, 2))):
            drawn.input()
        for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=12)):
            step(drawn)
        gm = drawn.finish()
        copied_to = {
            n.args[0].name
            for n in gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
        }
        mutated = [
            n.name in copied_to for n in gm.graph.find_nodes(op="placeholder")
        ]
        seen = functools.partial(
            observed, flying=drawn.flying_inputs, mutated=mutated, group=self.group
        )
        expected = seen(gm)
        for t in expected[0]:
            self.assertFalse(t.isnan().any(), f"a program that is wrong was drawn\n{gm.code}")
        result, copying = self.reinplace(drawn, gm)
        actual = seen(result)
        self.assertIsNone(
            difference(actual, expected), f"before:{gm.code}\nafter:{result.code}"
        )
        self.assertEqual(pending(), 0)
        for name in copying:
            cheaper, _ = self.reinplace(drawn, gm, but=name)
            try:
                wrong = difference(seen(cheaper), expected)
            except RuntimeError as e:  # a copy of a tensor to a view of itself
                wrong = str(e)
            self.assertIsNotNone(
                wrong,
                f"{name} need not have copied\nbefore:{gm.code}\nafter:{result.code}",
            )
        hypothesis.event(f"{len(copying)} waits copy")

    def test_random_graphs(self):
        test = hypothesis.settings(
            max_examples=GRAPHS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )(hypothesis.given(st.data())(lambda data: self.check(data)))
        with lazy_group(allow_pending=True) as self.group:
            test()


if __name__ == "__main__":
    run_tests()
