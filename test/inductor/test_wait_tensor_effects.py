# Owner(s): ["oncall: distributed"]

"""What wait_tensor's schema promises, from the dispatcher down to Inductor's code.

All on one rank, under the process group whose results appear only when they are
waited for: a read too early is a NaN, every time.
"""

import json
import subprocess
import sys
import tempfile
import unittest.mock
import zipfile
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
import torch.distributed._functional_collectives as funcol
import torch.fx as fx
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx._wait_tensor import is_wait_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))
from lazy_process_group import is_poison, lazy_group, pending, work_registry_size
from stock_torch import run_stock
from wait_tensor_bodies import BODIES, Bodies
from wait_tensor_programs import initial, Program, PROGRAMS


c10d = torch.ops._c10d_functional
aten = torch.ops.aten
WAIT, FUNCTIONAL = c10d.wait_tensor.default, c10d._wait_tensor_functional.default


class Graphs:
    """A backend for torch.compile that runs what AOTAutograd traced, and keeps it."""

    def __init__(self, **kwargs):
        self.code: list[str] = []
        self.modules: list[fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self.keep, **kwargs)

    def keep(self, gm, example_inputs):
        self.modules.append(gm)
        self.code.append(gm.code.strip())
        return make_boxed_func(gm.forward)


class LazyGroupTestCase(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        group = lazy_group()
        self.group = group.__enter__()
        self.addCleanup(group.__exit__, None, None, None)

    def assertAllWaited(self):
        self.assertEqual(pending(), 0)
        self.assertEqual(work_registry_size(), 0)

    def in_flight(self, *size, **kwargs):
        """A tensor of ones that is NaN until it is waited for."""
        t = c10d.all_reduce(torch.ones(*size, **kwargs), "sum", self.group)
        if t.numel():
            self.assertTrue(is_poison(t))
        return t

    def run_program(self, program: Program, fn):
        x = program.make_input(0, self.group)
        result = fn(x, self.group)
        self.assertEqual(result, program.expected([initial(0)], 0))
        if program.grad:
            result.backward()
            self.assertEqual(x.grad, program.expected_grad([initial(0)], 0))
        # Neither the wait nor the backward may have written to the caller's tensor.
        self.assertEqual(x.detach(), initial(0))
        self.assertAllWaited()
        return result


class TestSchema(TestCase):
    def test_schemas(self):
        self.assertEqual(
            str(WAIT._schema),
            "_c10d_functional::wait_tensor(Tensor(a!) self) -> Tensor(a!)",
        )
        self.assertEqual(
            str(FUNCTIONAL._schema),
            "_c10d_functional::_wait_tensor_functional(Tensor self) -> Tensor",
        )
        self.assertEqual(
            str(torch.ops.c10d_functional.wait_tensor.default._schema),
            "c10d_functional::wait_tensor(Tensor(a!) self) -> Tensor(a!)",
        )
        for op in (WAIT, FUNCTIONAL):
            self.assertIn(torch.Tag.pt2_compliant_tag, op.tags)

    def test_schema_right_after_import(self):
        # A fresh process, since this one has imported torch.distributed.
        code = (
            "import torch, sys; print(torch.ops._c10d_functional.wait_tensor.default"
            "._schema); assert 'torch.distributed._functional_collectives' not in"
            " sys.modules"
        )
        out = subprocess.check_output([sys.executable, "-c", code], text=True)
        self.assertEqual(
            out.strip(), "_c10d_functional::wait_tensor(Tensor(a!) self) -> Tensor(a!)"
        )

    def test_opcheck(self):
        for t in (
            torch.randn(3, 4),
            torch.randn(3, 4, requires_grad=True),
            torch.randn(4, 6)[1:3, ::2],
            torch.randn(4, dtype=torch.complex64),
            torch.randn(()),
            torch.randn(0, 3),
        ):
            torch.library.opcheck(FUNCTIONAL, (t,))

    def test_typed_callers_keep_their_signature(self):
        # The kernel's C++ signature is what the dispatcher checks callers against.
        dump = torch._C._dispatch_dump("_c10d_functional::wait_tensor")
        FileCheck().check("CompositeExplicitAutograd").check_same(
            "(Tensor _0) -> Tensor _0"
        ).run(dump)


class TestEager(LazyGroupTestCase):
    def make(self, kind):
        leaf = self.in_flight(4, 6)
        return {
            "plain": lambda: leaf,
            "leaf": lambda: leaf.requires_grad_(),
            "non-leaf": lambda: leaf.requires_grad_().view(-1),
            "view": lambda: leaf[1:],
            "strided view": lambda: leaf.t()[::2, 1:],
            "expanded": lambda: leaf[:, None].expand(4, 3, 6),
            "complex": lambda: self.in_flight(4, dtype=torch.complex64),
            "conj": lambda: self.in_flight(4, dtype=torch.complex64).conj(),
            "neg": lambda: self.in_flight(4, dtype=torch.complex64).conj().imag,
            "empty": lambda: self.in_flight(0, 3),
            "zero-dim": lambda: self.in_flight(()),
            "integer": lambda: self.in_flight(4, dtype=torch.int64),
            "nothing pending": lambda: torch.ones(4),
        }[kind](), leaf

    KINDS = [
        "plain",
        "leaf",
        "non-leaf",
        "view",
        "strided view",
        "expanded",
        "complex",
        "conj",
        "neg",
        "empty",
        "zero-dim",
        "integer",
        "nothing pending",
    ]

    def expected(self, t):
        # The imaginary part of ones is a zero, here of either sign.
        return torch.zeros_like(t) if t.is_neg() else torch.ones_like(t)

    @parametrize("kind", KINDS)
    @parametrize("mode", ["grad", "no_grad", "inference_mode"])
    def test_in_place(self, kind, mode):
        t, leaf = self.make(kind)
        state = (t.grad_fn, t.requires_grad, t._version)
        with {
            "grad": torch.enable_grad,
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
        }[mode]():
            self.assertIs(c10d.wait_tensor(t), t)
            self.assertIs(torch.ops.c10d_functional.wait_tensor(t), t)
        self.assertEqual((t.grad_fn, t.requires_grad, t._version), state)
        self.assertEqual(t.detach(), self.expected(t), exact_device=True)
        c10d.wait_tensor(leaf)
        self.assertAllWaited()

    @parametrize("kind", KINDS)
    def test_functional(self, kind):
        t, leaf = self.make(kind)
        waited = c10d._wait_tensor_functional(t)
        self.assertEqual(waited.detach(), self.expected(t))
        self.assertEqual(waited.requires_grad, t.requires_grad)
        self.assertEqual(
            (waited.size(), waited.stride(), waited.storage_offset()),
            (t.size(), t.stride(), t.storage_offset()),
        )
        if t.numel():
            self.assertNotEqual(
                waited.untyped_storage().data_ptr(), t.untyped_storage().data_ptr()
            )
        c10d.wait_tensor(leaf)
        self.assertAllWaited()

    @parametrize("op", [c10d.wait_tensor, c10d._wait_tensor_functional])
    def test_gradients_flow_through(self, op):
        x = torch.randn(3, dtype=torch.double, requires_grad=True)
        self.assertTrue(torch.autograd.gradcheck(lambda x: op(x * 2) * x, (x,)))
        self.assertTrue(torch.autograd.gradgradcheck(lambda x: op(x * 2) * x, (x,)))

    @parametrize("op", [c10d.wait_tensor, c10d._wait_tensor_functional])
    def test_meta_and_fake_tensors_keep_their_geometry(self, op):
        def geometry(t):
            return t.size(), t.stride(), t.storage_offset(), t.dtype

        real = torch.empty(4, 6)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = mode.from_tensor(real)
            for base in (fake, torch.empty(4, 6, device="meta")):
                for t in (base, base.t(), base[1:3, ::2], base[:, None].expand(4, 5, 6)):
                    self.assertEqual(geometry(op(t)), geometry(t))
                    self.assertEqual(op(t) is t, op is c10d.wait_tensor)


class TestTracedGraphs(LazyGroupTestCase):
    """What functionalization and the partitioner make of each program."""

    def graphs(self, name):
        program = PROGRAMS[name]
        graphs = Graphs()
        compiled = torch.compile(
            program.fn, backend=graphs.backend, fullgraph=True, dynamic=program.dynamic
        )
        self.run_program(program, compiled)
        for code in graphs.code:
            self.assertNotIn("c10d_functional.wait_tensor", code)
            self.assertNotIn("clone(", code)
            if name != "J":  # which does write to a slice
                self.assertNotRegex(code, r"aten\.\w+_scatter")
        return "\n\n".join(graphs.code)

    def test_A_all_reduce_through_funcol_then_add(self):
        self.assertExpectedInline(self.graphs("A"), """\
def forward(self, arg0_1):
    all_reduce = torch.ops._c10d_functional.all_reduce.default(arg0_1, 'sum', '0');  arg0_1 = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    add = torch.ops.aten.add.Tensor(wait_tensor, 1);  wait_tensor = None
    return (add,)""")

    def test_B_wait_ignored_the_output_read(self):
        self.assertExpectedInline(self.graphs("B"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 1);  primals_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    mul_1 = torch.ops.aten.mul.Tensor(wait_tensor, 2);  wait_tensor = None
    sum_1 = torch.ops.aten.sum.default(mul_1);  mul_1 = None
    return (sum_1,)

def forward(self, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, 2);  expand = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(mul_2, 'sum', '0');  mul_2 = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_3 = torch.ops.aten.mul.Tensor(wait_tensor_1, 1);  wait_tensor_1 = None
    return (mul_3,)""")

    def test_C_wait_on_a_graph_input(self):
        self.assertExpectedInline(self.graphs("C"), """\
def forward(self, arg0_1):
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(arg0_1);  arg0_1 = None
    mul = torch.ops.aten.mul.Tensor(wait_tensor, 2);  wait_tensor = None
    return (mul,)""")

    def test_D_wait_ignored_nothing_read(self):
        self.assertExpectedInline(self.graphs("D"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 1)
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = wait_tensor = None
    mul_1 = torch.ops.aten.mul.Tensor(primals_1, 2);  primals_1 = None
    sum_1 = torch.ops.aten.sum.default(mul_1);  mul_1 = None
    return (sum_1,)

def forward(self, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, 2);  expand = None
    return (mul_2,)""")

    def test_E_view_taken_before_the_wait(self):
        self.assertExpectedInline(self.graphs("E"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 1);  primals_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    slice_2 = torch.ops.aten.slice.Tensor(wait_tensor, 0, 1, 9223372036854775807);  wait_tensor = None
    mul_1 = torch.ops.aten.mul.Tensor(slice_2, 2);  slice_2 = None
    sum_1 = torch.ops.aten.sum.default(mul_1);  mul_1 = None
    return (sum_1,)

def forward(self, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [7]);  tangents_1 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, 2);  expand = None
    slice_backward = torch.ops.aten.slice_backward.default(mul_2, [8], 0, 1, 9223372036854775807, 1);  mul_2 = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(slice_backward, 'sum', '0');  slice_backward = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_3 = torch.ops.aten.mul.Tensor(wait_tensor_1, 1);  wait_tensor_1 = None
    return (mul_3,)""")

    def test_F_wait_on_a_slice(self):
        self.assertExpectedInline(self.graphs("F"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 1);  primals_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    mul_1 = torch.ops.aten.mul.Tensor(wait_tensor, 2);  wait_tensor = None
    sum_1 = torch.ops.aten.sum.default(mul_1);  mul_1 = None
    return (sum_1,)

def forward(self, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, 2);  expand = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(mul_2, 'sum', '0');  mul_2 = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_3 = torch.ops.aten.mul.Tensor(wait_tensor_1, 1);  wait_tensor_1 = None
    return (mul_3,)""")

    def test_G_both_returned(self):
        self.assertExpectedInline(self.graphs("G"), """\
def forward(self, arg0_1):
    mul = torch.ops.aten.mul.Tensor(arg0_1, 1);  arg0_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    return (wait_tensor, wait_tensor)""")

    def test_H_training(self):
        self.assertExpectedInline(self.graphs("H"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    pow_1 = torch.ops.aten.pow.Tensor_Scalar(wait_tensor, 2)
    sum_1 = torch.ops.aten.sum.default(pow_1);  pow_1 = None
    return (sum_1, wait_tensor)

def forward(self, wait_tensor, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    pow_2 = torch.ops.aten.pow.Tensor_Scalar(wait_tensor, 1.0);  wait_tensor = None
    mul_1 = torch.ops.aten.mul.Scalar(pow_2, 2.0);  pow_2 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, mul_1);  expand = mul_1 = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(mul_2, 'sum', '0');  mul_2 = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_3 = torch.ops.aten.mul.Tensor(wait_tensor_1, 3);  wait_tensor_1 = None
    return (mul_3,)""")

    def test_I_wait_on_a_leaf(self):
        self.assertExpectedInline(self.graphs("I"), """\
def forward(self, primals_1):
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(primals_1);  primals_1 = None
    mul = torch.ops.aten.mul.Tensor(wait_tensor, wait_tensor)
    sum_1 = torch.ops.aten.sum.default(mul);  mul = None
    return (sum_1, wait_tensor)

def forward(self, wait_tensor, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_1 = torch.ops.aten.mul.Tensor(expand, wait_tensor)
    mul_2 = torch.ops.aten.mul.Tensor(expand, wait_tensor);  expand = wait_tensor = None
    add = torch.ops.aten.add.Tensor(mul_2, mul_1);  mul_2 = mul_1 = None
    return (add,)""")

    def test_J_slice_waited_on_then_mutated(self):
        self.assertExpectedInline(self.graphs("J"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 1);  primals_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    slice_2 = torch.ops.aten.slice.Tensor(wait_tensor, 0, 1, 9223372036854775807)
    add = torch.ops.aten.add.Tensor(slice_2, 1);  slice_2 = None
    slice_scatter = torch.ops.aten.slice_scatter.default(wait_tensor, add, 0, 1, 9223372036854775807);  wait_tensor = add = None
    mul_1 = torch.ops.aten.mul.Tensor(slice_scatter, slice_scatter)
    sum_1 = torch.ops.aten.sum.default(mul_1);  mul_1 = None
    return (sum_1, slice_scatter)

def forward(self, slice_scatter, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, slice_scatter)
    mul_3 = torch.ops.aten.mul.Tensor(expand, slice_scatter);  expand = slice_scatter = None
    add_1 = torch.ops.aten.add.Tensor(mul_3, mul_2);  mul_3 = mul_2 = None
    new_empty_strided = torch.ops.aten.new_empty_strided.default(add_1, [8], [1])
    copy = torch.ops.aten.copy.default(new_empty_strided, add_1);  new_empty_strided = add_1 = None
    slice_6 = torch.ops.aten.slice.Tensor(copy, 0, 1, 9223372036854775807)
    clone = torch.ops.aten.clone.default(slice_6, memory_format = torch.contiguous_format)
    copy_1 = torch.ops.aten.copy.default(slice_6, clone);  slice_6 = clone = None
    slice_scatter_1 = torch.ops.aten.slice_scatter.default(copy, copy_1, 0, 1, 9223372036854775807);  copy = copy_1 = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(slice_scatter_1, 'sum', '0');  slice_scatter_1 = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_4 = torch.ops.aten.mul.Tensor(wait_tensor_1, 1);  wait_tensor_1 = None
    return (mul_4,)""")

    def test_K_wait_on_a_slice_of_an_input(self):
        self.assertExpectedInline(self.graphs("K"), """\
def forward(self, primals_1):
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(primals_1);  primals_1 = None
    mul = torch.ops.aten.mul.Tensor(wait_tensor, wait_tensor)
    sum_1 = torch.ops.aten.sum.default(mul);  mul = None
    return (sum_1, wait_tensor)

def forward(self, wait_tensor, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_1 = torch.ops.aten.mul.Tensor(expand, wait_tensor)
    mul_2 = torch.ops.aten.mul.Tensor(expand, wait_tensor);  expand = wait_tensor = None
    add = torch.ops.aten.add.Tensor(mul_2, mul_1);  mul_2 = mul_1 = None
    return (add,)""")

    def test_L_coalesced(self):
        self.assertExpectedInline(self.graphs("L"), """\
def forward(self, arg0_1):
    mul = torch.ops.aten.mul.Tensor(arg0_1, 1)
    mul_1 = torch.ops.aten.mul.Tensor(arg0_1, 2)
    all_reduce_coalesced = torch.ops._c10d_functional.all_reduce_coalesced.default([mul, mul_1], 'sum', '0');  mul = mul_1 = None
    getitem = all_reduce_coalesced[0]
    getitem_1 = all_reduce_coalesced[1];  all_reduce_coalesced = None
    mul_2 = torch.ops.aten.mul.Tensor(arg0_1, 1)
    mul_3 = torch.ops.aten.mul.Tensor(arg0_1, 2)
    all_gather_into_tensor_coalesced = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([mul_2, mul_3], 1, '0');  mul_2 = mul_3 = None
    getitem_2 = all_gather_into_tensor_coalesced[0]
    getitem_3 = all_gather_into_tensor_coalesced[1];  all_gather_into_tensor_coalesced = None
    mul_4 = torch.ops.aten.mul.Tensor(arg0_1, 1)
    mul_5 = torch.ops.aten.mul.Tensor(arg0_1, 2);  arg0_1 = None
    reduce_scatter_tensor_coalesced = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default([mul_4, mul_5], 'sum', 1, '0');  mul_4 = mul_5 = None
    getitem_4 = reduce_scatter_tensor_coalesced[0]
    getitem_5 = reduce_scatter_tensor_coalesced[1];  reduce_scatter_tensor_coalesced = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(getitem);  getitem = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(getitem_1);  getitem_1 = None
    wait_tensor_2 = torch.ops._c10d_functional._wait_tensor_functional.default(getitem_2);  getitem_2 = None
    wait_tensor_3 = torch.ops._c10d_functional._wait_tensor_functional.default(getitem_3);  getitem_3 = None
    wait_tensor_4 = torch.ops._c10d_functional._wait_tensor_functional.default(getitem_4);  getitem_4 = None
    wait_tensor_5 = torch.ops._c10d_functional._wait_tensor_functional.default(getitem_5);  getitem_5 = None
    add = torch.ops.aten.add.Tensor(wait_tensor, 1);  wait_tensor = None
    add_1 = torch.ops.aten.add.Tensor(wait_tensor_1, 1);  wait_tensor_1 = None
    add_2 = torch.ops.aten.add.Tensor(wait_tensor_2, 1);  wait_tensor_2 = None
    add_3 = torch.ops.aten.add.Tensor(wait_tensor_3, 1);  wait_tensor_3 = None
    add_4 = torch.ops.aten.add.Tensor(wait_tensor_4, 1);  wait_tensor_4 = None
    add_5 = torch.ops.aten.add.Tensor(wait_tensor_5, 1);  wait_tensor_5 = None
    return (add, add_1, add_2, add_3, add_4, add_5)""")

    def test_M_dynamic_shapes(self):
        self.assertExpectedInline(self.graphs("M"), """\
def forward(self, primals_1, primals_2):
    mul = torch.ops.aten.mul.Tensor(primals_2, 1);  primals_2 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    mul_4 = torch.ops.aten.mul.Tensor(wait_tensor, 2);  wait_tensor = None
    sum_1 = torch.ops.aten.sum.default(mul_4);  mul_4 = None
    return (sum_1, primals_1)

def forward(self, primals_1, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [primals_1]);  tangents_1 = primals_1 = None
    mul_6 = torch.ops.aten.mul.Tensor(expand, 2);  expand = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(mul_6, 'sum', '0');  mul_6 = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_7 = torch.ops.aten.mul.Tensor(wait_tensor_1, 1);  wait_tensor_1 = None
    return (None, mul_7)""")

    def test_N_two_waits(self):
        self.assertExpectedInline(self.graphs("N"), """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 1);  primals_1 = None
    all_reduce = torch.ops._c10d_functional.all_reduce.default(mul, 'sum', '0');  mul = None
    wait_tensor = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce);  all_reduce = None
    wait_tensor_1 = torch.ops._c10d_functional._wait_tensor_functional.default(wait_tensor);  wait_tensor = None
    mul_1 = torch.ops.aten.mul.Tensor(wait_tensor_1, 2);  wait_tensor_1 = None
    sum_1 = torch.ops.aten.sum.default(mul_1);  mul_1 = None
    return (sum_1,)

def forward(self, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [8]);  tangents_1 = None
    mul_2 = torch.ops.aten.mul.Tensor(expand, 2);  expand = None
    all_reduce_1 = torch.ops._c10d_functional.all_reduce.default(mul_2, 'sum', '0');  mul_2 = None
    wait_tensor_2 = torch.ops._c10d_functional._wait_tensor_functional.default(all_reduce_1);  all_reduce_1 = None
    mul_3 = torch.ops.aten.mul.Tensor(wait_tensor_2, 1);  wait_tensor_2 = None
    return (mul_3,)""")


class TestDeadWaits(LazyGroupTestCase):
    """A wait whose result nobody uses stays, in both forms and at every stage."""

    def dead_wait(self, op):
        def fn(x):
            y = c10d.all_reduce(x * 1, "sum", self.group)
            op(y)
            return (x * 2).sum()

        return fn

    @parametrize("op", [WAIT, FUNCTIONAL])
    def test_fx(self, op):
        gm = make_fx(self.dead_wait(op))(torch.ones(4))
        gm.graph.eliminate_dead_code()
        self.assertEqual([n.target for n in gm.graph.nodes if is_wait_tensor(n)], [op])

    @parametrize("op", [WAIT, FUNCTIONAL, c10d.wait_tensor, funcol.wait_tensor])
    def test_dynamo(self, op):
        backend = EagerAndRecordGraphs()
        torch.compile(self.dead_wait(op), backend=backend, fullgraph=True)(torch.ones(4))
        (gm,) = backend.graphs
        gm.graph.eliminate_dead_code()
        FileCheck().check_count("wait_tensor", 1).run(gm.code)
        self.assertAllWaited()

    @parametrize("op", [WAIT, FUNCTIONAL])
    @parametrize(
        "partition", [default_partition, min_cut_rematerialization_partition]
    )
    def test_partitioners(self, op, partition):
        def in_forward(x):
            return self.dead_wait(op)(x)

        class InBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                op(c10d.all_reduce(x * 3, "sum", self.group))
                return grad

        # The min-cut partitioner runs early what depends on primals alone.
        in_backward = [0, 1] if partition is default_partition else [1, 0]
        for fn, expected in (
            (in_forward, [1, 0]),
            (lambda x: InBackward.apply(x).sum(), in_backward),
        ):
            torch._dynamo.reset()
            graphs = Graphs(partition_fn=partition)
            x = torch.ones(4, requires_grad=True)
            torch.compile(fn, backend=graphs.backend, fullgraph=True)(x).backward()
            waits = [
                sum(map(is_wait_tensor, gm.graph.nodes)) for gm in graphs.modules
            ]
            self.assertEqual(waits, expected)
            self.assertAllWaited()

    @parametrize("op", [WAIT, FUNCTIONAL])
    @parametrize("grad", [False, True])
    def test_inductor(self, op, grad):
        x = torch.ones(4, requires_grad=grad)
        _, (code, *_) = run_and_get_code(
            torch.compile(self.dead_wait(op), fullgraph=True), x
        )
        FileCheck().check("all_reduce").check_count(
            "_c10d_functional.wait_tensor.default(", 1, exactly=True
        ).run(code[code.index("def call(") :])
        self.assertAllWaited()


class TestLowering(LazyGroupTestCase):
    def compiled(self, fn, *args):
        result, (code, *_) = run_and_get_code(torch.compile(fn, fullgraph=True), *args)
        return result, code[code.index("def call(") :]

    def test_a_result_that_escapes_is_copied_after_the_wait(self):
        x = self.in_flight(4)
        result, code = self.compiled(lambda x: c10d._wait_tensor_functional(x), x)
        self.assertEqual(result, torch.ones(4))
        self.assertNotEqual(result.data_ptr(), x.data_ptr())
        FileCheck().check("_c10d_functional.wait_tensor.default(arg0_1)").check(
            "cpp_fused"
        ).run(code)
        self.assertNotIn("_wait_tensor_functional.default(", code)
        self.assertAllWaited()

    def test_graphs_that_no_pass_reinplaced(self):
        with unittest.mock.patch(
            "torch._inductor.fx_passes.post_grad.reinplace_inplaceable_ops",
            lambda *_: None,
        ):
            result, code = self.compiled(
                lambda x: c10d._wait_tensor_functional(x) + x, self.in_flight(4)
            )
        self.assertEqual(result, 2 * torch.ones(4))
        FileCheck().check("_c10d_functional.wait_tensor.default(arg0_1)").check(
            "cpp_fused"
        ).run(code)
        self.assertAllWaited()

    @parametrize("way", ["export", "export then decompose", "aoti", "standalone"])
    def test_graphs_compiled_later(self, way):
        class Module(torch.nn.Module):
            def forward(self, x, group=self.group):
                y = c10d.all_reduce(x, "sum", group)
                c10d.wait_tensor(y[1:])
                return y + 1

        packaged: list[str] = []

        def compile_and_run(x):
            if way == "standalone":
                graph = make_fx(Module())(x)
                return torch._inductor.standalone_compile(graph, (x,))(x)
            program = torch.export.export(Module(), (x,), strict=False)
            if way == "aoti":
                path = torch._inductor.aoti_compile_and_package(program)
                with zipfile.ZipFile(path) as package:
                    cpp = [n for n in package.namelist() if n.endswith("wrapper.cpp")]
                    packaged.extend(package.read(n).decode() for n in cpp)
                return torch._inductor.aoti_load_package(path)(x)
            if way == "export then decompose":
                program = program.run_decompositions()
            return torch.compile(program.module(), fullgraph=True)(x)

        with fresh_cache():
            result, codes = run_and_get_code(compile_and_run, torch.ones(4))
        codes = packaged or codes
        self.assertEqual(result, torch.full((4,), 2.0))
        self.assertEqual(len(codes), 1)
        self.assertIn("wait_tensor", codes[0])
        self.assertNotIn("_wait_tensor_functional", codes[0])
        self.assertNotIn("clone", codes[0])
        self.assertAllWaited()

    @inductor_config.patch(freezing=True)
    def test_freezing(self):
        weight = torch.nn.Parameter(torch.ones(4))

        def fn(x):
            y = c10d.all_reduce(x @ weight.view(4, 1), "sum", self.group)
            c10d.wait_tensor(y)
            return y + weight

        with torch.no_grad():
            result, code = self.compiled(fn, torch.ones(4, 4))
        self.assertEqual(result, torch.full((4, 4), 5.0))
        FileCheck().check_count("_c10d_functional.wait_tensor.default(", 1, exactly=True).run(code)
        self.assertNotIn("_wait_tensor_functional", code)
        self.assertAllWaited()

    @parametrize("backend", ["aot_eager", "inductor"])
    @parametrize(
        "view",
        [
            subtest(lambda t: t.t(), "transposed"),
            subtest(lambda t: t[1:3, ::2], "gaps_and_offset"),
            subtest(lambda t: t[:, None].expand(4, 3, 6), "overlaps"),
            subtest(lambda t: t[2:], "offset"),
            subtest(lambda t: t[0, 0], "zero_dim"),
        ],
    )
    @parametrize("grad", [False, True])
    def test_inputs_of_any_geometry(self, backend, view, grad):
        # The waited input and the functional result must agree on their strides.
        def fn(x):
            c10d.wait_tensor(x)
            return x * 2, x.as_strided(x.size(), x.stride())

        base = self.in_flight(4, 6)
        x = view(base).detach().requires_grad_(grad)
        doubled, alias = torch.compile(fn, backend=backend, fullgraph=True)(x)
        self.assertEqual(doubled.detach(), torch.full(x.size(), 2.0))
        self.assertEqual(alias.detach(), torch.ones(x.size()))
        self.assertEqual(alias.stride(), x.stride())
        self.assertEqual(base, torch.ones(4, 6))
        if grad:
            (doubled.sum() + alias.sum()).backward()
            self.assertEqual(x.grad, torch.full(x.size(), 3.0))
        self.assertAllWaited()


class TestWaitedInputs(LazyGroupTestCase):
    """To wait for an input leaves no other trace on it, whoever compiles the program."""

    WAYS = {
        "eager": lambda fn: fn,
        "aot": lambda fn: torch.compile(fn, backend=Graphs().backend, fullgraph=True),
        "aot_eager": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
        "inductor": lambda fn: torch.compile(fn, fullgraph=True),
        "functionalize": torch.func.functionalize,
    }

    @staticmethod
    def wait_and_double(x):
        c10d.wait_tensor(x)
        return x * 2

    @parametrize("way", WAYS)
    @parametrize("kind", ["plain", "leaf", "non-leaf", "view", "inference", "expanded"])
    def test_no_trace(self, way, kind):
        with torch.inference_mode(kind == "inference"):
            base = self.in_flight(4)
        x = {
            "plain": lambda: base,
            "leaf": lambda: base.requires_grad_(),
            "non-leaf": lambda: base.requires_grad_().view(2, 2),
            "view": lambda: base[1:],
            "inference": lambda: base,
            "expanded": lambda: base[:, None].expand(4, 3),
        }[kind]()

        def state():
            version = None if x.is_inference() else x._version
            return x.grad_fn, x.requires_grad, version

        before = state()
        result = self.WAYS[way](self.wait_and_double)(x)
        self.assertEqual(state(), before)
        self.assertEqual(result.detach(), torch.full(x.size(), 2.0))
        self.assertEqual(x.detach(), torch.ones(x.size()))
        if x.requires_grad:
            result.sum().backward()
            self.assertEqual(base.grad, torch.full((4,), 2.0))
        c10d.wait_tensor(base)
        self.assertAllWaited()

    @parametrize("way", WAYS)
    def test_saved_before_the_wait(self, way):
        # Whoever saved the tensor earlier may still go backward.
        x, p = torch.ones(4), torch.ones(4, requires_grad=True)
        y = (x * p).sum()
        self.WAYS[way](self.wait_and_double)(x)
        y.backward()
        self.assertEqual(p.grad, torch.ones(4))

    @parametrize("way", ["aot", "aot_eager", "inductor"])
    def test_overlapping_views_of_one_leaf(self, way):
        def fn(a, b):
            c10d.wait_tensor(a)
            return (a * a).sum() + (b * b).sum()

        p = torch.arange(8.0).requires_grad_()
        self.WAYS[way](fn)(p[:5], p[3:]).backward()
        expected = 2 * torch.arange(8.0)
        expected[3:5] *= 2
        self.assertEqual(p.grad, expected)

    @parametrize("way", ["aot", "aot_eager", "inductor"])
    def test_also_mutated(self, way):
        # AOTAutograd clones such an input, but not before it has been waited for.
        def fn(x):
            c10d.wait_tensor(x[1:])
            x[1:].detach().add_(1)
            return x * 2

        x = self.in_flight(4).requires_grad_()
        result = self.WAYS[way](fn)(x)
        self.assertEqual(x.detach(), torch.tensor([1.0, 2, 2, 2]))
        self.assertEqual(result.detach(), torch.tensor([2.0, 4, 4, 4]))
        result.sum().backward()
        self.assertEqual(x.grad, torch.full((4,), 2.0))
        self.assertAllWaited()

    @parametrize("way", ["aot", "aot_eager", "inductor"])
    def test_returned(self, way):
        def fn(x):
            return c10d.wait_tensor(x), x.view(2, 2), x[1:]

        x = self.in_flight(4)
        same, view, part = self.WAYS[way](fn)(x)
        self.assertIs(same, x)
        for t in (view, part):
            self.assertEqual(
                t.untyped_storage().data_ptr(), x.untyped_storage().data_ptr()
            )
            self.assertEqual(t, torch.ones_like(t))
        self.assertAllWaited()

    def test_aliases_of_an_input_cost_no_copy(self):
        def fn(x):
            c10d.wait_tensor(x)
            return x.view(2, 2), x[1:]

        _, (code, *_) = run_and_get_code(torch.compile(fn), self.in_flight(4))
        call = code[code.index("def call(") : code.index("\nrunner = ")]
        FileCheck().check_count("wait_tensor.default(", 1, exactly=True).run(call)
        self.assertNotRegex(call, r"empty_strided|cpp_\w+\(|copy_|clone")

    def test_a_waited_tangent_costs_no_copy(self):
        class WaitInBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return c10d.wait_tensor(grad)

        def train():
            x = torch.randn(4, requires_grad=True)
            torch.compile(WaitInBackward.apply)(x).sum().backward()
            self.assertEqual(x.grad, torch.ones(4))

        _, (_, code) = run_and_get_code(train)
        call = code[code.index("def call(") : code.index("\nrunner = ")]
        FileCheck().check_count("wait_tensor.default(", 1, exactly=True).run(call)
        self.assertNotRegex(call, r"empty_strided|cpp_\w+\(|copy_|clone")

    @parametrize("aoti", [False, True])
    def test_exported_parameter(self, aoti):
        class Waits(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.p = torch.nn.Parameter(torch.arange(4.0))

            def forward(self, x):
                c10d.wait_tensor(self.p)
                return x + self.p

        program = torch.export.export(Waits(), (torch.ones(4),))
        if aoti:
            with tempfile.TemporaryDirectory() as scratch:
                path = torch._inductor.aoti_compile_and_package(
                    program, package_path=f"{scratch}/waits.pt2"
                )
                run = torch._inductor.aoti_load_package(path)
        else:
            program = program.run_decompositions()
            self.assertEqual(program.graph_signature.parameters_to_mutate, {})
            run = program.module()
        self.assertEqual(run(torch.ones(4)).detach(), torch.arange(4.0) + 1)


class TestBodies(Bodies, LazyGroupTestCase):
    """Waits inside the bodies of higher-order ops, on their inputs and on their own tensors."""

    @parametrize("body", [subtest(body, name) for name, body in BODIES.items()])
    @parametrize("backend", ["aot_eager", "inductor"])
    @parametrize("grad", [False, True])
    def test(self, body, backend, grad):
        x = (torch.arange(4.0) + 1).requires_grad_(grad)
        fn = torch.compile(lambda x: body(self, x), backend=backend, fullgraph=True)
        if body is BODIES["effectful_op"]:
            self.enterContext(self.effects())
        result = fn(x)
        self.assertEqual(result.detach(), 2 * x.detach())
        if grad:
            result.sum().backward()
            self.assertEqual(x.grad, torch.full((4,), 2.0))
        self.assertEqual(x.detach(), torch.arange(4.0) + 1)
        self.assertAllWaited()


class TestInductorCode(LazyGroupTestCase):
    """What Inductor generates, against what it does on stock."""

    @parametrize("name", PROGRAMS)
    def test_values(self, name):
        program = PROGRAMS[name]
        compiled = torch.compile(program.fn, fullgraph=True, dynamic=program.dynamic)
        self.run_program(program, compiled)

    def test_counts(self):
        script = str(Path(__file__).with_name("codegen_counts.py"))
        theirs = json.loads(run_stock(script))
        ours = json.loads(subprocess.check_output([sys.executable, script]))
        self.assertEqual(list(ours), list(theirs))
        for name in ours:
            self.assertEqual(ours[name], theirs[name], f"program {name}")
            self.assertTrue(all(c["functional waits"] == 0 for c in ours[name]), name)


instantiate_parametrized_tests(TestBodies)
instantiate_parametrized_tests(TestDeadWaits)
instantiate_parametrized_tests(TestEager)
instantiate_parametrized_tests(TestInductorCode)
instantiate_parametrized_tests(TestLowering)
instantiate_parametrized_tests(TestWaitedInputs)

if __name__ == "__main__":
    run_tests()
