# Owner(s): ["oncall: distributed"]

"""The reinplace pass, a case a test: the graph before and after, copies, values.

Each test runs on two ranks, under the process group whose results appear only when
they are waited for. Its text is the graph with what the pass changed marked: ``-``
before, ``+`` after. Then both graphs are run. The first, whose waits are functional,
sees no poison, or the case is not a correct program; the second must give the same
values, leave the same in the inputs, and share memory only where the first does.
"""

import contextlib
import difflib
import re
import sys
import types
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.utils import ReinplaceCounters
from torch._functorch._aot_autograd.descriptors import (
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
)
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.fx_passes.post_grad import (
    decompose_auto_functionalized,
    decompose_triton_kernel_wrapper_functional,
)
from torch._inductor.utils import run_and_get_code
from torch.fx._wait_tensor import is_wait_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils._ordered_set import OrderedSet


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))
from lazy_process_group import pending, work_registry_size
from stock_torch import require_patched
from wait_tensor_bodies import BODIES, Bodies
from wait_tensor_graphs import copied, difference, observe, reinplace


c10d = torch.ops._c10d_functional
aten = torch.ops.aten
wait = c10d._wait_tensor_functional
FUNCTIONAL = c10d._wait_tensor_functional.default


@torch.library.custom_op("test_wait_tensor::double_", mutates_args={"x"})
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def text(gm: fx.GraphModule) -> list[str]:
    """The graph's code, and that of the bodies in it, without what FX repeats."""
    lines = []
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
            code = module.code.strip().replace("def forward(", f"def {name or 'forward'}(")
            code = re.sub(r";  [\w = ]+ = None$", "", code, flags=re.MULTILINE)
            lines += re.sub(r"torch\.ops\.|\.default(?=\()", "", code).splitlines()
    return lines


def calls(gm: fx.GraphModule, *targets) -> int:
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return sum(n.target in targets for m in modules for n in m.graph.nodes)


def save_outputs(gm: fx.GraphModule) -> None:
    output = gm.graph.output_node()
    if not isinstance(output.args[0], (list, tuple)):
        output.args = ((output.args[0],),)
    output.meta["desc"] = [SavedForBackwardsAOTOutput(i) for i in range(len(output.args[0]))]


def ones(*size, **kwargs):
    return torch.ones(*size, **kwargs)


class Kernel:
    """In place of Triton's JITFunction: adds one to its only argument."""

    arg_names = ["out"]

    @property
    def fn(self):
        return types.SimpleNamespace(__name__="add_one")

    def __getitem__(self, grid):
        return lambda out: out.add_(1)


@contextlib.contextmanager
def triton():
    """What the pass asks of Triton, which a machine without a GPU lacks."""
    runtime = {
        "triton.runtime.jit": types.SimpleNamespace(JITFunction=Kernel),
        "triton.runtime.autotuner": types.SimpleNamespace(Autotuner=type("Autotuner", (), {})),
    }
    packages = {"triton": types.ModuleType("triton"), "triton.runtime": types.ModuleType("runtime")}
    kernel_side_table.reset_table()
    with unittest.mock.patch.dict(sys.modules, packages | runtime):
        yield


def launched(out: torch.Tensor) -> torch.Tensor:
    return triton_kernel_wrapper_functional(
        kernel_idx=kernel_side_table.add_kernel(KERNEL),
        constant_args_idx=kernel_side_table.add_constant_args({}),
        grid=[(1, 1, 1)],
        tma_descriptor_metadata={},
        kwargs={"out": out},
        tensors_to_clone=["out"],
    )["out"]


KERNEL = Kernel()


class TestReinplacing(Bodies, MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "lazy"

    @classmethod
    def setUpClass(cls):
        require_patched()
        super().setUpClass()

    @property
    def group(self) -> str:
        return dist.group.WORLD.group_name

    def check(
        self,
        fn: Callable,
        *args: torch.Tensor,
        expected: str,
        copies: int = 0,
        flying: Sequence[int] = (),
        tracing: str = "fake",
        saved: bool = False,
        edit: Callable[[fx.GraphModule], None] = lambda gm: None,
    ) -> None:
        """``flying`` are the positions of the arguments in flight when the graph is called.

        ``edit`` changes the traced graph before the pass sees it. If its outputs are
        ``saved`` for backward, nobody can tell what memory they share.
        """
        registered = work_registry_size()
        before, mode = self.traced(fn, args, tracing)
        edit(before)
        before.recompile()
        after = reinplace(copied(before), mode)
        # The rest of the way to lowering, where what is not in place becomes a clone.
        decompose_triton_kernel_wrapper_functional(after.graph)
        decompose_auto_functionalized(after.graph)
        after.graph.eliminate_dead_code(lambda n: n.is_impure() or n.target is triton_kernel_wrapper_mutation)
        lines = difflib.ndiff(text(before), text(after))
        listing = "\n".join(line.rstrip() for line in lines if line[0] != "?")
        self.assertExpectedInline(listing, expected, skip=1)
        self.assertEqual(calls(after, FUNCTIONAL), copies)

        mutated = [
            any(n.target is aten.copy_.default and n.args[0] is x for n in x.users)
            for x in before.graph.find_nodes(op="placeholder")
        ]
        in_flight = [i in flying for i in range(len(args))]
        mine = [a * (self.rank + 1) if a.is_floating_point() else a for a in args]
        seen = [observe(gm, [a.clone() for a in mine], in_flight, mutated, self.group) for gm in (before, after)]
        for value in seen[0][0]:
            floats = torch.view_as_real(value) if value.is_complex() else value
            self.assertFalse(floats.isnan().any(), "the program reads what is in flight")
        if saved:
            seen = [(values, set(), set()) for values, *_ in seen]
        self.assertIsNone(difference(seen[1], seen[0]))
        self.assertEqual(pending(), 0)
        self.assertEqual(work_registry_size(), registered)

    def traced(self, fn, args, tracing):
        if tracing == "fake":
            with torch._subclasses.FakeTensorMode() as mode:
                fakes = [mode.from_tensor(arg) for arg in args]
            return make_fx(fn)(*fakes), mode
        gm = make_fx(fn, tracing_mode=tracing)(*args)
        return gm, next(iter(gm.graph.nodes)).meta["val"].fake_mode

    def started(self, x):
        return c10d.all_reduce(x, "sum", self.group)

    def test_an_intermediate(self):
        def fn(x):
            y = self.started(x)
            return wait(y) + 1

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      add = aten.add.Tensor(wait_tensor, 1)
      return add""",
        )

    def test_the_unwaited_output_is_used_after_the_wait(self):
        def fn(x):
            y = self.started(x)
            w = wait(y)
            return y, y.view(2, 2), w + y

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      view = aten.view(all_reduce, [2, 2])
      add = aten.add.Tensor(wait_tensor, all_reduce)
      return (all_reduce, view, add)""",
        )

    def test_an_input_that_is_copied_back_to(self):
        def fn(x):
            w = wait(x)
            x.copy_(w)
            return w + 1

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     copy_ = aten.copy_(x_1, wait_tensor)
-     add = aten.add.Tensor(wait_tensor, 1)
+     add = aten.add.Tensor(x_1, 1)
      return add""",
        )

    def test_an_input_that_is_waited_on_then_updated(self):
        def fn(x):
            x.copy_(wait(x) + 1)

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     add = aten.add.Tensor(wait_tensor, 1)
+     add = aten.add.Tensor(x_1, 1)
      copy_ = aten.copy_(x_1, add)
      return None""",
        )

    def test_an_input_that_is_waited_on_then_updated_in_place(self):
        # As on stock: one wait, one update, no copy.
        def fn(x, i, v):
            x.copy_(aten.index_put(wait(x), [i], v))

        args = ones(4), torch.tensor([0]), ones(1)
        self.check(
            fn,
            *args,
            flying=[0],
            expected="""\
  def forward(self, x_1, i_1, v_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     index_put = aten.index_put(wait_tensor, [i_1], v_1)
+     index_put = aten.index_put_(x_1, [i_1], v_1)
-     copy_ = aten.copy_(x_1, index_put)
      return None""",
        )

    def test_an_input_of_which_a_slice_is_updated(self):
        def fn(x):
            w = wait(x)
            x.copy_(aten.slice_scatter(w, aten.slice(w, 0, 1) + 1, 0, 1))

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     slice_1 = aten.slice.Tensor(wait_tensor, 0, 1)
+     slice_1 = aten.slice.Tensor(x_1, 0, 1)
      add = aten.add.Tensor(slice_1, 1)
-     slice_scatter = aten.slice_scatter(wait_tensor, add, 0, 1)
-     copy_ = aten.copy_(x_1, slice_scatter)
+     slice_tensor = aten.slice.Tensor(x_1, 0, 1)
+     copy__default = aten.copy_(slice_tensor, add)
      return None""",
        )

    def test_an_input_that_nothing_is_copied_back_to(self):
        def fn(saved):
            return wait(saved) + 1

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, saved_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(saved_1)
+     wait_tensor = _c10d_functional.wait_tensor(saved_1)
      add = aten.add.Tensor(wait_tensor, 1)
      return add""",
        )

    def test_two_waits(self):
        def fn(x):
            w = wait(wait(x))
            x.copy_(w)
            return w + 1

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(wait_tensor)
+     wait_tensor_1 = _c10d_functional.wait_tensor(x_1)
-     copy_ = aten.copy_(x_1, wait_tensor_1)
-     add = aten.add.Tensor(wait_tensor_1, 1)
+     add = aten.add.Tensor(x_1, 1)
      return add""",
        )

    def test_the_result_escapes(self):
        # A fresh tensor was promised; in place it would be the caller's own input.
        def fn(x):
            return wait(x)

        self.check(
            fn,
            ones(4),
            flying=[0],
            copies=1,
            expected="""\
  def forward(self, x_1):
      wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
      return wait_tensor""",
        )

    def test_a_view_of_the_second_result_escapes(self):
        # The last wait gives the fresh storage; the first has no need to.
        def fn(x):
            w = wait(x)
            return wait(w.view(2, 2)).view(-1)[1:], w + 1

        self.check(
            fn,
            ones(4),
            flying=[0],
            copies=1,
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
      view = aten.view(wait_tensor, [2, 2])
      wait_tensor_1 = _c10d_functional._wait_tensor_functional(view)
      view_1 = aten.view(wait_tensor_1, [-1])
      slice_1 = aten.slice.Tensor(view_1, 0, 1, 9223372036854775807)
      add = aten.add.Tensor(wait_tensor, 1)
      return (slice_1, add)""",
        )

    def test_the_unwaited_output_escapes_too(self):
        def fn(x):
            y = self.started(x)
            return wait(y), y

        self.check(
            fn,
            ones(4),
            copies=1,
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
      return (wait_tensor, all_reduce)""",
        )

    def test_several_waits_escape(self):
        def fn(x):
            y = self.started(x)
            w = wait(y)
            return w, wait(w), wait(y)

        self.check(
            fn,
            ones(4),
            copies=2,
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      wait_tensor_1 = _c10d_functional._wait_tensor_functional(wait_tensor)
      wait_tensor_2 = _c10d_functional._wait_tensor_functional(all_reduce)
      return (wait_tensor, wait_tensor_1, wait_tensor_2)""",
        )

    def test_an_escaping_intermediate(self):
        def fn(x):
            y = self.started(x)
            return wait(y).view(2, 2)

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      view = aten.view(wait_tensor, [2, 2])
      return view""",
        )

    def test_ops_after_the_wait_know_what_it_made_alias(self):
        # On y the update may be in place. On x it must not: x is the caller's.
        def fn(x, i, v):
            y = self.started(x)
            return (
                aten.index_put(wait(y), [i], v),
                aten.index_put(wait(x), [i], v),
            )

        args = ones(4), torch.tensor([0]), ones(1)
        self.check(
            fn,
            *args,
            expected="""\
  def forward(self, x_1, i_1, v_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
-     index_put = aten.index_put(wait_tensor, [i_1], v_1)
+     index_put = aten.index_put_(wait_tensor, [i_1], v_1)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor_1 = _c10d_functional.wait_tensor(x_1)
      index_put_1 = aten.index_put(wait_tensor_1, [i_1], v_1)
      return (index_put, index_put_1)""",
        )

    def test_an_update_keeps_off_a_live_alias(self):
        # y is read last, so index_put must not write to the memory it shares with w.
        def fn(x, i, v):
            y = self.started(x)
            w = wait(y)
            return aten.index_put(w, [i], v), y + 1

        args = ones(4), torch.tensor([0]), ones(1)
        self.check(
            fn,
            *args,
            expected="""\
  def forward(self, x_1, i_1, v_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      index_put = aten.index_put(wait_tensor, [i_1], v_1)
      add = aten.add.Tensor(all_reduce, 1)
      return (index_put, add)""",
        )

    def test_the_waited_value_outlives_the_input(self):
        # In place it would be read after the copy, and be 1 too large.
        def fn(x):
            w = wait(x)
            x.copy_(w + 1)
            return (w.view(2, 2),)

        for edit in (lambda gm: None, save_outputs):
            with self.subTest(edit=edit):
                self.check(
                    fn,
                    ones(4),
                    flying=[0],
                    copies=1,
                    edit=edit,
                    expected="""\
  def forward(self, x_1):
      wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
      add = aten.add.Tensor(wait_tensor, 1)
      copy_ = aten.copy_(x_1, add)
      view = aten.view(wait_tensor, [2, 2])
      return (view,)""",
                )

    def test_saved_for_backward_is_no_escape(self):
        def fn(x):
            y = self.started(x)
            return wait(y), y, wait(x)

        def save_all_but_first(gm):
            save_outputs(gm)
            gm.graph.output_node().meta["desc"][0] = PlainAOTOutput(0)

        self.check(
            fn,
            ones(4),
            saved=True,
            edit=save_all_but_first,
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor_1 = _c10d_functional.wait_tensor(x_1)
      return (wait_tensor, all_reduce, wait_tensor_1)""",
        )

    def test_a_saved_activation_in_a_backward(self):
        # Saved in flight by the forward: a placeholder to which nothing is copied back.
        def fn(saved, tangent):
            return wait(saved) * tangent + saved

        self.check(
            fn,
            ones(4),
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, saved_1, tangent_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(saved_1)
+     wait_tensor = _c10d_functional.wait_tensor(saved_1)
      mul = aten.mul.Tensor(wait_tensor, tangent_1)
      add = aten.add.Tensor(mul, saved_1)
      return add""",
        )

    def test_an_input_in_flight_is_read_after_the_wait(self):
        def fn(x):
            doubled = wait(x) * 2
            return doubled, x[1:] + 1

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
      mul = aten.mul.Tensor(wait_tensor, 2)
      slice_1 = aten.slice.Tensor(x_1, 0, 1, 9223372036854775807)
      add = aten.add.Tensor(slice_1, 1)
      return (mul, add)""",
        )

    def test_waits_in_a_row_on_an_input_in_flight(self):
        def fn(x):
            return wait(wait(x)) + wait(x) + x

        self.check(
            fn,
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(wait_tensor)
+     wait_tensor_1 = _c10d_functional.wait_tensor(wait_tensor)
-     wait_tensor_2 = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor_2 = _c10d_functional.wait_tensor(x_1)
      add = aten.add.Tensor(wait_tensor_1, wait_tensor_2)
      add_1 = aten.add.Tensor(add, x_1)
      return add_1""",
        )

    def test_an_attribute(self):
        weight = torch.ones(4)

        def fn(x):
            return wait(weight) * x

        self.check(
            fn,
            ones(4),
            tracing="real",
            expected="""\
  def forward(self, x_1):
      _tensor_constant0 = self._tensor_constant0
-     wait_tensor = _c10d_functional._wait_tensor_functional(_tensor_constant0)
+     wait_tensor = _c10d_functional.wait_tensor(_tensor_constant0)
      mul = aten.mul.Tensor(wait_tensor, x_1)
      return mul""",
        )

    # Views

    def test_a_view_of_a_view(self):
        def fn(x):
            y = self.started(x)
            w = wait(y[1:].view(-1)[::2])
            return w + 1, y * 2

        self.check(
            fn,
            ones(5),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      slice_1 = aten.slice.Tensor(all_reduce, 0, 1, 9223372036854775807)
      view = aten.view(slice_1, [-1])
      slice_2 = aten.slice.Tensor(view, 0, 0, 9223372036854775807, 2)
-     wait_tensor = _c10d_functional._wait_tensor_functional(slice_2)
+     wait_tensor = _c10d_functional.wait_tensor(slice_2)
      add = aten.add.Tensor(wait_tensor, 1)
      mul = aten.mul.Tensor(all_reduce, 2)
      return (add, mul)""",
        )

    def test_a_view_taken_before_the_wait(self):
        def fn(x):
            y = self.started(x)
            view = y.view(2, 2)
            w = wait(y)
            return view + 1, w * 2

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      view = aten.view(all_reduce, [2, 2])
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      add = aten.add.Tensor(view, 1)
      mul = aten.mul.Tensor(wait_tensor, 2)
      return (add, mul)""",
        )

    def test_as_strided(self):
        def fn(x):
            y = self.started(x)
            w = wait(aten.as_strided(y, (2, 2), (4, 1), 1))
            return aten.as_strided(w, (3,), (1,), 1) + 1, y + 1

        self.check(
            fn,
            ones(4, 4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      as_strided = aten.as_strided(all_reduce, [2, 2], [4, 1], 1)
-     wait_tensor = _c10d_functional._wait_tensor_functional(as_strided)
+     wait_tensor = _c10d_functional.wait_tensor(as_strided)
      as_strided_1 = aten.as_strided(wait_tensor, [3], [1], 1)
      add = aten.add.Tensor(as_strided_1, 1)
      add_1 = aten.add.Tensor(all_reduce, 1)
      return (add, add_1)""",
        )

    def test_another_dtype(self):
        def fn(x):
            y = self.started(x)
            w = wait(y.view(torch.int32))
            return w + 1, y + 1, w.view(torch.float32) * 2

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      view = aten.view.dtype(all_reduce, torch.int32)
      detach = aten.detach(view)
-     wait_tensor = _c10d_functional._wait_tensor_functional(detach)
+     wait_tensor = _c10d_functional.wait_tensor(detach)
      add = aten.add.Tensor(wait_tensor, 1)
      add_1 = aten.add.Tensor(all_reduce, 1)
      view_1 = aten.view.dtype(wait_tensor, torch.float32)
      detach_1 = aten.detach(view_1)
      mul = aten.mul.Tensor(detach_1, 2)
      return (add, add_1, mul)""",
        )

    def test_view_as_real(self):
        def fn(x):
            y = self.started(torch.view_as_real(x))
            w = wait(y)
            return torch.view_as_complex(w) * 2, torch.view_as_complex(y).real + 1

        self.check(
            fn,
            ones(4, dtype=torch.complex64),
            expected="""\
  def forward(self, x_1):
      view_as_real = aten.view_as_real(x_1)
      all_reduce = _c10d_functional.all_reduce(view_as_real, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      view_as_complex = aten.view_as_complex(wait_tensor)
      mul = aten.mul.Tensor(view_as_complex, 2)
      view_as_complex_1 = aten.view_as_complex(all_reduce)
      view_as_real_1 = aten.view_as_real(view_as_complex_1)
      select = aten.select.int(view_as_real_1, 1, 0)
      add = aten.add.Tensor(select, 1)
      return (mul, add)""",
        )

    def test_the_complex_view_is_waited_on(self):
        def fn(x):
            y = self.started(torch.view_as_real(x))
            w = wait(torch.view_as_complex(y))
            return w * 2, y + 1

        self.check(
            fn,
            ones(4, dtype=torch.complex64),
            expected="""\
  def forward(self, x_1):
      view_as_real = aten.view_as_real(x_1)
      all_reduce = _c10d_functional.all_reduce(view_as_real, 'sum', '0')
      view_as_complex = aten.view_as_complex(all_reduce)
-     wait_tensor = _c10d_functional._wait_tensor_functional(view_as_complex)
+     wait_tensor = _c10d_functional.wait_tensor(view_as_complex)
      mul = aten.mul.Tensor(wait_tensor, 2)
      add = aten.add.Tensor(all_reduce, 1)
      return (mul, add)""",
        )

    def test_chunks_of_a_gathered_tensor(self):
        # The Work is the storage's: to wait on one chunk is to wait on all.
        def fn(x):
            y = c10d.all_gather_into_tensor(x, 2, self.group)
            mine, other = aten.split(y, 4)
            return wait(mine) + 1, other * 2

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(x_1, 2, '0')
      split = aten.split.Tensor(all_gather_into_tensor, 4)
      getitem = split[0]
      getitem_1 = split[1]
-     wait_tensor = _c10d_functional._wait_tensor_functional(getitem)
+     wait_tensor = _c10d_functional.wait_tensor(getitem)
      add = aten.add.Tensor(wait_tensor, 1)
      mul = aten.mul.Tensor(getitem_1, 2)
      return (add, mul)""",
        )

    def test_non_overlapping_views_are_updated(self):
        # Both halves live in the storage that was waited for, and y is not read again.
        def fn(x, v):
            y = self.started(x)
            w = wait(y[:2])
            return aten.slice_scatter(y, w + v, 0, 2, 4)

        self.check(
            fn,
            ones(4),
            ones(2),
            expected="""\
  def forward(self, x_1, v_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      slice_1 = aten.slice.Tensor(all_reduce, 0, 0, 2)
-     wait_tensor = _c10d_functional._wait_tensor_functional(slice_1)
+     wait_tensor = _c10d_functional.wait_tensor(slice_1)
      add = aten.add.Tensor(wait_tensor, v_1)
-     slice_scatter = aten.slice_scatter(all_reduce, add, 0, 2, 4)
+     slice_scatter_default = aten.slice_scatter(all_reduce, add, 0, 2, 4)
-     return slice_scatter
+     return slice_scatter_default""",
        )

    def test_a_half_is_waited_on_and_the_other_updated(self):
        def fn(x, i, v):
            y = self.started(x)
            w = wait(y[:2])
            return aten.index_put(y[2:], [i], v), w + 1

        self.check(
            fn,
            ones(4),
            torch.tensor([0]),
            ones(1),
            expected="""\
  def forward(self, x_1, i_1, v_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      slice_1 = aten.slice.Tensor(all_reduce, 0, 0, 2)
-     wait_tensor = _c10d_functional._wait_tensor_functional(slice_1)
+     wait_tensor = _c10d_functional.wait_tensor(slice_1)
      slice_2 = aten.slice.Tensor(all_reduce, 0, 2, 9223372036854775807)
-     index_put = aten.index_put(slice_2, [i_1], v_1)
+     index_put = aten.index_put_(slice_2, [i_1], v_1)
      add = aten.add.Tensor(wait_tensor, 1)
      return (index_put, add)""",
        )

    def test_an_overlapping_part_is_updated(self):
        def fn(x, i, v):
            y = self.started(x)
            w = wait(y[:3])
            return aten.index_put(y[2:], [i], v), w + 1

        self.check(
            fn,
            ones(4),
            torch.tensor([0]),
            ones(1),
            expected="""\
  def forward(self, x_1, i_1, v_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      slice_1 = aten.slice.Tensor(all_reduce, 0, 0, 3)
-     wait_tensor = _c10d_functional._wait_tensor_functional(slice_1)
+     wait_tensor = _c10d_functional.wait_tensor(slice_1)
      slice_2 = aten.slice.Tensor(all_reduce, 0, 2, 9223372036854775807)
      index_put = aten.index_put(slice_2, [i_1], v_1)
      add = aten.add.Tensor(wait_tensor, 1)
      return (index_put, add)""",
        )

    # Collectives

    def test_outputs_of_a_coalesced_collective(self):
        def fn(x, z):
            a, b = c10d.all_reduce_coalesced([x, z], "sum", self.group)
            return wait(a) + wait(b), a * 2, b[1:]

        self.check(
            fn,
            ones(4),
            ones(4),
            expected="""\
  def forward(self, x_1, z_1):
      all_reduce_coalesced = _c10d_functional.all_reduce_coalesced([x_1, z_1], 'sum', '0')
      getitem = all_reduce_coalesced[0]
      getitem_1 = all_reduce_coalesced[1]
-     wait_tensor = _c10d_functional._wait_tensor_functional(getitem)
+     wait_tensor = _c10d_functional.wait_tensor(getitem)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(getitem_1)
+     wait_tensor_1 = _c10d_functional.wait_tensor(getitem_1)
      add = aten.add.Tensor(wait_tensor, wait_tensor_1)
      mul = aten.mul.Tensor(getitem, 2)
      slice_1 = aten.slice.Tensor(getitem_1, 0, 1, 9223372036854775807)
      return (add, mul, slice_1)""",
        )

    def test_a_collective_in_place(self):
        def fn(x):
            y = c10d.all_reduce_(x * 2, "sum", self.group)
            return wait(y) + y

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      mul = aten.mul.Tensor(x_1, 2)
      all_reduce_ = _c10d_functional.all_reduce_(mul, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce_)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce_)
      add = aten.add.Tensor(wait_tensor, all_reduce_)
      return add""",
        )

    def test_a_collective_in_place_on_an_input(self):
        def fn(x):
            y = c10d.all_reduce_(x, "sum", self.group)
            return wait(y) + x

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce_ = _c10d_functional.all_reduce_(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce_)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce_)
      add = aten.add.Tensor(wait_tensor, all_reduce_)
      return add""",
        )

    def test_a_collective_into_a_slice_of_a_buffer(self):
        # As bucketing makes them: one buffer, gathered into in place.
        def fn(x):
            buffer = aten.new_empty(x, [3, 4])
            out = aten.slice(buffer, 0, 1, 3)
            y = c10d.all_gather_into_tensor_out(x, 2, self.group, out=out)
            w = wait(y)
            return w + 1, out * 2

        self.check(
            fn,
            ones(1, 4),
            expected="""\
  def forward(self, x_1):
      new_empty = aten.new_empty(x_1, [3, 4])
      slice_1 = aten.slice.Tensor(new_empty, 0, 1, 3)
      all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out(x_1, 2, '0', out = slice_1)
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_gather_into_tensor_out)
+     wait_tensor = _c10d_functional.wait_tensor(all_gather_into_tensor_out)
      add = aten.add.Tensor(wait_tensor, 1)
      mul = aten.mul.Tensor(slice_1, 2)
      return (add, mul)""",
        )

    def test_a_collective_on_a_waited_tensor(self):
        # The second all_reduce may reuse the first one's buffer, for nothing reads it again.
        def fn(x):
            return wait(self.started(wait(self.started(x * 2)))) + 1

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      mul = aten.mul.Tensor(x_1, 2)
-     all_reduce = _c10d_functional.all_reduce(mul, 'sum', '0')
+     all_reduce = _c10d_functional.all_reduce_(mul, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
-     all_reduce_1 = _c10d_functional.all_reduce(wait_tensor, 'sum', '0')
+     all_reduce_1 = _c10d_functional.all_reduce_(wait_tensor, 'sum', '0')
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(all_reduce_1)
+     wait_tensor_1 = _c10d_functional.wait_tensor(all_reduce_1)
      add = aten.add.Tensor(wait_tensor_1, 1)
      return add""",
        )

    def test_a_collective_on_a_waited_tensor_that_lives_on(self):
        def fn(x):
            w = wait(self.started(x))
            return wait(self.started(w)) + 1, w

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      all_reduce_1 = _c10d_functional.all_reduce(wait_tensor, 'sum', '0')
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(all_reduce_1)
+     wait_tensor_1 = _c10d_functional.wait_tensor(all_reduce_1)
      add = aten.add.Tensor(wait_tensor_1, 1)
      return (add, wait_tensor)""",
        )

    def test_several_kinds(self):
        def fn(x):
            scattered = c10d.reduce_scatter_tensor(x, "sum", 2, self.group)
            exchanged = c10d.all_to_all_single(x, [2, 2], [2, 2], self.group)
            sent = c10d.broadcast(x, 1, self.group)
            return wait(scattered) + 1, wait(exchanged) + wait(sent) * sent

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor(x_1, 'sum', 2, '0')
      all_to_all_single = _c10d_functional.all_to_all_single(x_1, [2, 2], [2, 2], '0')
      broadcast = _c10d_functional.broadcast(x_1, 1, '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(reduce_scatter_tensor)
+     wait_tensor = _c10d_functional.wait_tensor(reduce_scatter_tensor)
      add = aten.add.Tensor(wait_tensor, 1)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(all_to_all_single)
+     wait_tensor_1 = _c10d_functional.wait_tensor(all_to_all_single)
-     wait_tensor_2 = _c10d_functional._wait_tensor_functional(broadcast)
+     wait_tensor_2 = _c10d_functional.wait_tensor(broadcast)
      mul = aten.mul.Tensor(wait_tensor_2, broadcast)
      add_1 = aten.add.Tensor(wait_tensor_1, mul)
      return (add, add_1)""",
        )

    # Symbols

    def test_dynamic_sizes(self):
        def fn(x):
            y = self.started(x)
            w = wait(y[1:])
            return w + 1, y.view(-1) * y.size(0)

        self.check(
            fn,
            ones(5, 3),
            tracing="symbolic",
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      slice_1 = aten.slice.Tensor(all_reduce, 0, 1, 9223372036854775807)
-     wait_tensor = _c10d_functional._wait_tensor_functional(slice_1)
+     wait_tensor = _c10d_functional.wait_tensor(slice_1)
      add = aten.add.Tensor(wait_tensor, 1)
      view = aten.view(all_reduce, [-1])
      sym_size_int = aten.sym_size.int(x_1, 0)
      mul = aten.mul.Tensor(view, sym_size_int)
      return (add, mul)""",
        )

    def test_unbacked_sizes(self):
        def fn(x):
            picked = x[x.nonzero().squeeze(1)]
            y = self.started(picked)
            w = wait(y)
            return w + y, y[:1] * 2

        self.check(
            fn,
            torch.tensor([1.0, 0.0, 2.0]),
            tracing="symbolic",
            expected="""\
  def forward(self, x_1):
      nonzero = aten.nonzero(x_1)
      squeeze = aten.squeeze.dim(nonzero, 1)
      index = aten.index.Tensor(x_1, [squeeze])
-     all_reduce = _c10d_functional.all_reduce(index, 'sum', '0')
+     all_reduce = _c10d_functional.all_reduce_(index, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
      add = aten.add.Tensor(wait_tensor, all_reduce)
      slice_1 = aten.slice.Tensor(all_reduce, 0, 0, 1)
      mul = aten.mul.Tensor(slice_1, 2)
      return (add, mul)""",
        )

    # Neighbours

    def test_foreach_on_inputs(self):
        def fn(x, z):
            a, b = aten._foreach_add([wait(x), z], 1)
            x.copy_(a)
            z.copy_(b)

        self.check(
            fn,
            ones(4),
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1, z_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     _foreach_add = aten._foreach_add.Scalar([wait_tensor, z_1], 1)
+     _foreach_add = aten._foreach_add_.Scalar([x_1, z_1], 1)
-     getitem = _foreach_add[0]
-     getitem_1 = _foreach_add[1]
-     copy_ = aten.copy_(x_1, getitem)
-     copy__1 = aten.copy_(z_1, getitem_1)
      return None""",
        )

    def test_foreach_on_an_input_whose_waited_value_is_read_later(self):
        # The foreach may not be in place, the wait may.
        def fn(x, z):
            w = wait(x)
            a, b = aten._foreach_add([w, z], 1)
            doubled = w * 2
            x.copy_(a)
            z.copy_(b)
            return doubled

        self.check(
            fn,
            ones(4),
            ones(4),
            flying=[0],
            expected="""\
  def forward(self, x_1, z_1):
-     wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
+     wait_tensor = _c10d_functional.wait_tensor(x_1)
-     _foreach_add = aten._foreach_add.Scalar([wait_tensor, z_1], 1)
+     _foreach_add = aten._foreach_add.Scalar([x_1, z_1], 1)
      getitem = _foreach_add[0]
      getitem_1 = _foreach_add[1]
-     mul = aten.mul.Tensor(wait_tensor, 2)
+     mul = aten.mul.Tensor(x_1, 2)
      copy_ = aten.copy_(x_1, getitem)
      copy__1 = aten.copy_(z_1, getitem_1)
      return mul""",
        )

    def test_the_waited_value_is_read_after_the_input_was_overwritten(self):
        def fn(x):
            w = wait(x)
            x.copy_(w + 1)
            return w * 2

        self.check(
            fn,
            ones(4),
            flying=[0],
            copies=1,
            expected="""\
  def forward(self, x_1):
      wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
      add = aten.add.Tensor(wait_tensor, 1)
      copy_ = aten.copy_(x_1, add)
      mul = aten.mul.Tensor(wait_tensor, 2)
      return mul""",
        )

    def test_a_second_wait_on_what_the_first_one_copied(self):
        def fn(x):
            w = wait(x)
            again = wait(w)
            x.copy_(again + 1)
            return w * 2, again

        self.check(
            fn,
            ones(4),
            flying=[0],
            copies=1,
            expected="""\
  def forward(self, x_1):
      wait_tensor = _c10d_functional._wait_tensor_functional(x_1)
-     wait_tensor_1 = _c10d_functional._wait_tensor_functional(wait_tensor)
+     wait_tensor_1 = _c10d_functional.wait_tensor(wait_tensor)
      add = aten.add.Tensor(wait_tensor_1, 1)
      copy_ = aten.copy_(x_1, add)
      mul = aten.mul.Tensor(wait_tensor, 2)
      return (mul, wait_tensor_1)""",
        )

    def test_a_custom_op_on_a_waited_tensor(self):
        def fn(x):
            w = wait(self.started(x))
            return auto_functionalized_v2(torch.ops.test_wait_tensor.double_.default, _x_base_index=0, _all_bases=[w])[
                1
            ]

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
+     double__default = test_wait_tensor.double_(wait_tensor)
+     return wait_tensor
-     auto_functionalized_v2 = higher_order.auto_functionalized_v2(test_wait_tensor.double_.default, _x_base_index = 0, _all_bases = [wait_tensor])
-     getitem = auto_functionalized_v2[0]
-     getitem_1 = auto_functionalized_v2[1]
-     return getitem_1""",
        )

    def test_a_custom_op_while_the_unwaited_tensor_lives_on(self):
        def fn(x):
            y = self.started(x)
            doubled = auto_functionalized_v2(
                torch.ops.test_wait_tensor.double_.default,
                _x_base_index=0,
                _all_bases=[wait(y)],
            )[1]
            return doubled, y + 1

        self.check(
            fn,
            ones(4),
            expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
-     auto_functionalized_v2 = higher_order.auto_functionalized_v2(test_wait_tensor.double_.default, _x_base_index = 0, _all_bases = [wait_tensor])
-     getitem = auto_functionalized_v2[0]
-     getitem_1 = auto_functionalized_v2[1]
+     as_strided_default = aten.as_strided(wait_tensor, [4], [1], 0)
+     clone_default = aten.clone(as_strided_default)
+     as_strided_default_1 = aten.as_strided(clone_default, [4], [1], 0)
+     double__default = test_wait_tensor.double_(as_strided_default_1)
      add = aten.add.Tensor(all_reduce, 1)
-     return (getitem_1, add)
+     return (as_strided_default_1, add)""",
        )

    def test_a_triton_kernel_on_a_waited_tensor(self):
        def fn(x):
            return launched(wait(self.started(x)))

        with triton():
            self.check(
                fn,
                ones(4),
                expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
+     triton_kernel_wrapper_mutation = higher_order.triton_kernel_wrapper_mutation(kernel_idx = 0, constant_args_idx = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'out': wait_tensor})
+     return wait_tensor
-     triton_kernel_wrapper_functional_proxy = higher_order.triton_kernel_wrapper_functional(kernel_idx = 0, constant_args_idx = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'out': wait_tensor}, tensors_to_clone = ['out'])
-     getitem = triton_kernel_wrapper_functional_proxy['out']
-     return getitem""",
            )

    def test_a_triton_kernel_while_the_unwaited_tensor_lives_on(self):
        def fn(x):
            y = self.started(x)
            return launched(wait(y)), y + 1

        with triton():
            self.check(
                fn,
                ones(4),
                expected="""\
  def forward(self, x_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
-     wait_tensor = _c10d_functional._wait_tensor_functional(all_reduce)
+     wait_tensor = _c10d_functional.wait_tensor(all_reduce)
-     triton_kernel_wrapper_functional_proxy = higher_order.triton_kernel_wrapper_functional(kernel_idx = 0, constant_args_idx = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'out': wait_tensor}, tensors_to_clone = ['out'])
-     getitem = triton_kernel_wrapper_functional_proxy['out']
+     as_strided_default = aten.as_strided(wait_tensor, [4], [1], 0)
+     clone_default = aten.clone(as_strided_default)
+     as_strided_default_1 = aten.as_strided(clone_default, [4], [1], 0)
+     triton_kernel_wrapper_mutation = higher_order.triton_kernel_wrapper_mutation(kernel_idx = 0, constant_args_idx = 0, grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'out': as_strided_default_1})
      add = aten.add.Tensor(all_reduce, 1)
-     return (getitem, add)
+     return (as_strided_default_1, add)""",
            )

    # Bodies

    @parametrize("name", [n for n in BODIES if n != "checkpoint"])
    def test_body(self, name):
        """The other bodies have graphs of their own; here their values, on two ranks."""
        torch._dynamo.reset()
        x = (torch.arange(4.0) + 1) * (self.rank + 1)
        total = (torch.arange(4.0) + 1) * 3
        squares = name in ("checkpoint_that_recomputes", "autograd_function")
        with self.effects() if name == "effectful_op" else contextlib.nullcontext():
            fn = torch.compile(lambda x: BODIES[name](self, x), fullgraph=True)
            result, codes = run_and_get_code(fn, x.clone())
        self.assertEqual(result, 2 * total * (total / x if squares else 1))
        for code in codes:
            self.assertNotIn("_wait_tensor_functional.default(", code)
        self.assertEqual(pending(), 0)

    def test_the_body_of_control_deps(self):
        def fn(x, z):
            y = self.started(x)
            z = z * 2
            return wait(y)[1:] + 1, z

        def order(gm):
            (node,) = filter(is_wait_tensor, gm.graph.nodes)
            (mul,) = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
            preserve_node_ordering(gm.graph, {node: OrderedSet([mul])})

        self.check(
            fn,
            ones(4),
            ones(4),
            edit=order,
            expected="""\
  def forward(self, x_1, z_1):
      all_reduce = _c10d_functional.all_reduce(x_1, 'sum', '0')
      mul = aten.mul.Tensor(z_1, 2)
      subgraph_wait_tensor = self.subgraph_wait_tensor
      wait_tensor = higher_order.control_deps((mul,), subgraph_wait_tensor, all_reduce)
      slice_1 = aten.slice.Tensor(wait_tensor, 0, 1, 9223372036854775807)
      add = aten.add.Tensor(slice_1, 1)
      return (add, mul)
  def subgraph_wait_tensor(self, arg_0):
-     _wait_tensor_functional_default = _c10d_functional._wait_tensor_functional(arg_0)
+     _wait_tensor_functional_default = _c10d_functional.wait_tensor(arg_0)
      return _wait_tensor_functional_default""",
        )

    # Counting

    def test_copies_are_counted(self):
        def fn(x):
            return wait(x)

        ReinplaceCounters.clear()
        with self.assertLogs("torch._inductor.fx_passes.reinplace", "INFO") as logs:
            gm, mode = self.traced(fn, [ones(4)], "fake")
            reinplace(gm, mode)
        self.assertIn("candidates=1, remain copies=['wait_tensor']", logs.output[0])
        self.assertEqual(ReinplaceCounters.get_total_missed(), 1)
        self.assertEqual(ReinplaceCounters.get_total_missed_bytes(), 16)


instantiate_parametrized_tests(TestReinplacing)


if __name__ == "__main__":
    run_tests()
