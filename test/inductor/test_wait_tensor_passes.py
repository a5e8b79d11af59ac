# Owner(s): ["oncall: distributed"]

"""Every pass and tool that knows waits, fired on graphs that wait functionally.

One rank of a fake process group is enough to trace and to transform such graphs.
Each test fails when its pass looks for the in-place wait alone, or makes one.
Waits are shown as they stand before the reinplace pass, ``_wait_tensor_functional``,
unless a test says otherwise. ``docs/call_sites.md`` lists the passes.
"""

import contextlib
import functools
import re
import sys
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._tools.fake_collectives as fake_collectives
import torch.fx as fx
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
    remat_using_tags_for_fwd_loss_bwd_graph,
)
from torch._functorch.aot_autograd import aot_export_joint_simple, make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config
from torch._inductor._functionalize_collectives import (
    _functionalize_inplace_collectives,
)
from torch._inductor.comm_analysis import (
    estimate_fx_collective_size,
    estimate_nccl_collective_runtime_from_fx_node,
)
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import (
    bucketing,
    ddp_fusion,
    decomp_comms,
    fsdp,
    micro_pipeline_tp,
    node_runtime_estimation,
    overlap_scheduling,
    post_grad,
)
from torch._inductor.fx_passes.low_contention_collectives import (
    replace_collectives_with_low_contention,
)
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._symmetric_memory import _test_mode as symm_mem_test_mode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx._wait_tensor import is_wait_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from lazy_process_group import lazy_group


c10d = torch.ops._c10d_functional
aten = torch.ops.aten
WAIT, FUNCTIONAL = c10d.wait_tensor.default, c10d._wait_tensor_functional.default


def ones(*size):
    return torch.ones(size)


def functional_graph(fn, *args, **kwargs) -> fx.GraphModule:
    """What AOTAutograd gives to a compiler for ``fn``."""
    mode = FakeTensorMode()

    def flat(*args):
        result = fn(*args)
        return result if isinstance(result, (list, tuple)) else (result,)

    fakes = [mode.from_tensor(arg) for arg in args]
    return aot_export_joint_simple(flat, fakes, trace_joint=False, **kwargs)


def fake_mode(gm: fx.GraphModule):
    return V.set_fake_mode(next(iter(gm.graph.nodes)).meta["val"].fake_mode)


def ir(gm: fx.GraphModule) -> str:
    """The code of ``gm``, less what only frees names."""
    gm.graph.lint()
    gm.recompile()
    code = re.sub(r";  .* = None$", "", gm.code.strip(), flags=re.M)
    return code.replace("torch.ops.", "")


def waits(gm: fx.GraphModule) -> list[fx.Node]:
    """Those of ``gm`` and of the bodies of its higher-order ops."""
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return [node for m in modules for node in m.graph.nodes if is_wait_tensor(node)]


def targets(gm: fx.GraphModule) -> set[torch._ops.OpOverload]:
    return {wait.target for wait in waits(gm)}


@contextlib.contextmanager
def fake_group(world_size=2):
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


class FakeGroupTestCase(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.group = self.enter(fake_group())

    def enter(self, context):
        self.addCleanup(context.__exit__, None, None, None)
        return context.__enter__()

    # The functional API, whose waits are in place until AOTAutograd has traced them.
    def all_reduce(self, t):
        return funcol.all_reduce(t, "sum", self.group)

    def all_gather(self, t, dim=0):
        return funcol.all_gather_single(t, dim, self.group)

    def reduce_scatter(self, t, dim=0):
        return funcol.reduce_scatter_single(t, "sum", dim, self.group)

    def after_post_grad(self, gm, **options):
        """``gm`` after all of Inductor's post-grad passes, waiting in place."""
        self.assertEqual(targets(gm), {FUNCTIONAL})
        with fake_mode(gm), config.patch(options):
            post_grad.post_grad_passes(gm, is_inference=True)
        self.assertEqual(targets(gm), {WAIT})
        return ir(gm)


class TestNames(FakeGroupTestCase):
    def test_a_functional_wait_is_found_by_name(self):
        gm = functional_graph(lambda x: self.all_reduce(self.all_reduce(x)), ones(4))
        by_name = [n for n in gm.graph.nodes if "wait_tensor" in n.name]
        self.assertEqual(by_name, waits(gm))
        self.assertEqual([n.name for n in by_name], ["wait_tensor", "wait_tensor_1"])
        self.assertEqual(targets(gm), {FUNCTIONAL})


class TestPartitioners(FakeGroupTestCase):
    """Checkpointed regions that save the collective and compute the wait again."""

    def forward_and_backward(self, partition, fn):
        def region(x):
            return fn(self.all_reduce(x * 2))

        def policy(ctx, op, *args, **kwargs):
            if op is c10d.all_reduce.default:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        def checkpointed(x):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(region, x, use_reentrant=False, context_fn=contexts)

        graphs = []

        def keep(gm, _):
            graphs.append(gm)
            return make_boxed_func(gm.forward)

        backend = aot_autograd(fw_compiler=keep, partition_fn=partition)
        compiled = torch.compile(checkpointed, backend=backend, fullgraph=True)
        compiled(torch.ones(4, requires_grad=True)).sum().backward()
        return "\n\n".join(map(ir, graphs))

    @parametrize("partition", [default_partition, min_cut_rematerialization_partition])
    def test_what_only_dead_waits_use_is_not_saved(self, partition):
        code = self.forward_and_backward(partition, lambda y: y * 2)
        self.assertExpectedInline(code, """\
def forward(self, primals_1):
    mul = aten.mul.Tensor(primals_1, 2)
    all_reduce = _c10d_functional.all_reduce.default(mul, 'sum', '0')
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_reduce)
    mul_1 = aten.mul.Tensor(wait_tensor, 2)
    return (mul_1,)

def forward(self, tangents_1):
    mul_2 = aten.mul.Tensor(tangents_1, 2)
    all_reduce_1 = _c10d_functional.all_reduce.default(mul_2, 'sum', '0')
    wait_tensor_1 = _c10d_functional._wait_tensor_functional.default(all_reduce_1)
    mul_3 = aten.mul.Tensor(wait_tensor_1, 2)
    return (mul_3,)""")

    def test_a_wait_is_computed_again(self):
        # Were it impure as its collective is, default_partition would refuse.
        code = self.forward_and_backward(default_partition, torch.sin)
        self.assertExpectedInline(code, """\
def forward(self, primals_1):
    mul = aten.mul.Tensor(primals_1, 2)
    all_reduce = _c10d_functional.all_reduce.default(mul, 'sum', '0')
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_reduce)
    sin = aten.sin.default(wait_tensor)
    return (sin, all_reduce)

def forward(self, all_reduce, tangents_1):
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_reduce)
    cos = aten.cos.default(wait_tensor)
    mul_1 = aten.mul.Tensor(tangents_1, cos)
    all_reduce_1 = _c10d_functional.all_reduce.default(mul_1, 'sum', '0')
    wait_tensor_1 = _c10d_functional._wait_tensor_functional.default(all_reduce_1)
    mul_2 = aten.mul.Tensor(wait_tensor_1, 2)
    return (mul_2,)""")


class TestRemat(FakeGroupTestCase):
    def test_dead_waits_stay_and_moved_collectives_go(self):
        def fn(x):
            c10d.wait_tensor(c10d.all_reduce(x * 3, "sum", self.group))
            y = self.all_reduce(x * 2)
            return x.sum(), y.cos()

        gm = functional_graph(fn, ones(4))
        for node in gm.graph.nodes:
            if node.name in ("mul_1", "all_reduce_1", "wait_tensor_1"):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["autograd_backward"] = node.name == "cos"
        gm = remat_using_tags_for_fwd_loss_bwd_graph(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1):
    mul = aten.mul.Tensor(arg0_1, 3)
    all_reduce = _c10d_functional.all_reduce.default(mul, 'sum', '0')
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_reduce)
    sum_1 = aten.sum.default(arg0_1)
    mul_1_recomputed = aten.mul.Tensor(arg0_1, 2)
    all_reduce_1_recomputed = _c10d_functional.all_reduce.default(mul_1_recomputed, 'sum', '0')
    wait_tensor_1_recomputed = _c10d_functional._wait_tensor_functional.default(all_reduce_1_recomputed)
    cos = aten.cos.default(wait_tensor_1_recomputed)
    return (sum_1, cos)""")


class TestReorderForLocality(FakeGroupTestCase):
    def test_waits_stay_and_others_move(self):
        def fn(x, y):
            w = self.all_reduce(x)
            a = y + 1
            b = y.sin()
            return b * w, a + 2

        gm = functional_graph(fn, ones(4), ones(4))
        post_grad.reorder_for_locality(gm.graph)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    all_reduce = _c10d_functional.all_reduce.default(arg0_1, 'sum', '0')
    sin = aten.sin.default(arg1_1)
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_reduce)
    mul = aten.mul.Tensor(sin, wait_tensor)
    add = aten.add.Tensor(arg1_1, 1)
    add_1 = aten.add.Tensor(add, 2)
    return (mul, add_1)""")


class TestBucketing(FakeGroupTestCase):
    def two(self, collective):
        return functional_graph(
            lambda x, y: (collective(x), collective(y)), ones(4, 4), ones(2, 4)
        )

    def test_all_gathers(self):
        gm = self.two(self.all_gather)
        bucketing.bucket_all_gather(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    empty = aten.empty.memory_format([48], dtype = torch.float32, device = device(type='cpu'), pin_memory = False)
    slice_1 = aten.slice.Tensor(empty, 0, 0, 24)
    view = aten.view.default(arg0_1, [-1])
    view_1 = aten.view.default(arg1_1, [-1])
    cat = aten.cat.default([view, view_1])
    copy_ = aten.copy_.default(slice_1, cat)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(copy_, 2, '0', out = empty)
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(all_gather_into_tensor_out)
    view_2 = aten.view.default(wait_tensor_2, [2, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [16, 8], 1)
    getitem = split_with_sizes[0]
    getitem_1 = split_with_sizes[1]
    clone = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view = aten._unsafe_view.default(clone, [8, 4])
    clone_1 = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    _unsafe_view_1 = aten._unsafe_view.default(clone_1, [4, 4])
    return (_unsafe_view, _unsafe_view_1)""")

    @parametrize("mode", ["custom_ops", "custom_ops_multidtype"])
    def test_all_gathers_by_custom_ops(self, mode):
        gm = self.two(self.all_gather)
        bucketing.bucket_all_gather(gm, mode=mode)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    _pre_bucket_all_gather = bucketing._pre_bucket_all_gather.default([arg0_1, arg1_1], 2, torch.float32, [15, 15], 0, [0, -1, 1])
    slice_1 = aten.slice.Tensor(_pre_bucket_all_gather, 0, 0, 24)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(slice_1, 2, '0', out = _pre_bucket_all_gather)
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(all_gather_into_tensor_out)
    view = aten.view.default(wait_tensor_2, [2, -1])
    split_with_sizes = aten.split_with_sizes.default(view, [16, 8], 1)
    getitem = split_with_sizes[0]
    getitem_1 = split_with_sizes[1]
    view_1 = aten.view.dtype(getitem, torch.float32)
    clone = aten.clone.default(view_1, memory_format = torch.contiguous_format)
    _unsafe_view = aten._unsafe_view.default(clone, [8, 4])
    view_2 = aten.view.dtype(getitem_1, torch.float32)
    clone_1 = aten.clone.default(view_2, memory_format = torch.contiguous_format)
    _unsafe_view_1 = aten._unsafe_view.default(clone_1, [4, 4])
    return (_unsafe_view, _unsafe_view_1)""")

    def test_reduce_scatters(self):
        gm = self.two(self.reduce_scatter)
        bucketing.bucket_reduce_scatter(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    view = aten.view.default(arg0_1, [2, -1])
    view_1 = aten.view.default(arg1_1, [2, -1])
    cat = aten.cat.default([view, view_1], 1)
    view_2 = aten.view.default(cat, [24])
    reduce_scatter_tensor_2 = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 2, '0')
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(reduce_scatter_tensor_2)
    split_with_sizes = aten.split_with_sizes.default(wait_tensor_2, [8, 4])
    getitem = split_with_sizes[0]
    getitem_1 = split_with_sizes[1]
    view_3 = aten.view.default(getitem, [2, 4])
    view_4 = aten.view.default(getitem_1, [1, 4])
    return (view_3, view_4)""")

    def test_reduce_scatters_by_custom_ops(self):
        gm = self.two(self.reduce_scatter)
        bucketing.bucket_reduce_scatter(gm, mode="custom_ops")
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    _pre_bucket_reduce_scatter = bucketing._pre_bucket_reduce_scatter.default([arg0_1, arg1_1], 2)
    reduce_scatter_tensor_2 = _c10d_functional.reduce_scatter_tensor.default(_pre_bucket_reduce_scatter, 'sum', 2, '0')
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(reduce_scatter_tensor_2)
    split_with_sizes = aten.split_with_sizes.default(wait_tensor_2, [8, 4])
    getitem = split_with_sizes[0]
    getitem_1 = split_with_sizes[1]
    view = aten.view.default(getitem, [2, 4])
    view_1 = aten.view.default(getitem_1, [1, 4])
    return (view, view_1)""")

    def test_reduce_scatters_coalesced(self):
        gm = self.two(self.reduce_scatter)
        bucketing.bucket_reduce_scatter(gm, mode="coalesced")
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    view = aten.view.default(arg0_1, [-1])
    view_1 = aten.view.default(arg1_1, [-1])
    reduce_scatter_tensor_coalesced = _c10d_functional.reduce_scatter_tensor_coalesced.default([view, view_1], 'sum', 2, '0')
    getitem = reduce_scatter_tensor_coalesced[0]
    getitem_1 = reduce_scatter_tensor_coalesced[1]
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(getitem)
    wait_tensor_3 = _c10d_functional._wait_tensor_functional.default(getitem_1)
    view_2 = aten.view.default(wait_tensor_2, [2, 4])
    view_3 = aten.view.default(wait_tensor_3, [1, 4])
    return (view_2, view_3)""")

    def test_all_reduces(self):
        gm = self.two(self.all_reduce)
        bucketing.bucket_all_reduce(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    view = aten.view.default(arg0_1, [-1])
    view_1 = aten.view.default(arg1_1, [-1])
    cat = aten.cat.default([view, view_1])
    all_reduce_2 = _c10d_functional.all_reduce.default(cat, 'sum', '0')
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(all_reduce_2)
    split_with_sizes = aten.split_with_sizes.default(wait_tensor_2, [16, 8])
    getitem = split_with_sizes[0]
    getitem_1 = split_with_sizes[1]
    view_2 = aten.view.default(getitem, [4, 4])
    view_3 = aten.view.default(getitem_1, [2, 4])
    return (view_2, view_3)""")

    @parametrize("copy_in", [False, True])
    def test_the_merge_function_that_no_mode_chooses(self, copy_in):
        def fn(x, y):
            return bucketing.all_gather_merge_fn_to_trace_functional(
                [x, y], self.group, 2, x.dtype, 2 * [x.dtype], 0, copy_in
            )

        gm = make_fx(fn, tracing_mode="fake")(ones(4, 4), ones(2, 4))
        FileCheck().check("all_gather_copy_in" if copy_in else "aten.cat").check(
            "_wait_tensor_functional.default(all_gather_into_tensor_out)"
        ).run(ir(gm))

    def test_waits_may_be_moved_away_from_the_bucket(self):
        def fn(x, y, z):
            return self.all_reduce(x), self.all_reduce(y), z @ z

        gm = functional_graph(fn, ones(4, 4), ones(2, 4), ones(4, 4))
        bucket = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
        bucketing.merge_all_reduce_bucket(
            gm.graph, bucket, wait_insertion_point=gm.graph.output_node()
        )
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1, arg2_1):
    view = aten.view.default(arg0_1, [-1])
    view_1 = aten.view.default(arg1_1, [-1])
    cat = aten.cat.default([view, view_1])
    all_reduce_2 = _c10d_functional.all_reduce.default(cat, 'sum', '0')
    mm = aten.mm.default(arg2_1, arg2_1)
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(all_reduce_2)
    split_with_sizes = aten.split_with_sizes.default(wait_tensor_2, [16, 8])
    getitem = split_with_sizes[0]
    getitem_1 = split_with_sizes[1]
    view_2 = aten.view.default(getitem, [4, 4])
    view_3 = aten.view.default(getitem_1, [2, 4])
    return (view_2, view_3, mm)""")

    @parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
    def test_post_grad(self, collective):
        gm = self.two(getattr(self, collective))
        code = self.after_post_grad(gm, **{f"bucket_{collective}s_fx": "all"})
        for op in (collective, "wait_tensor"):
            FileCheck().check_count(f"c10d_functional.{op}", 1, exactly=True).run(code)

    @parametrize("collective", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"])
    def test_two_waits_on_one_collective_are_no_bucket(self, collective):
        # The partitioner's CSE makes one collective of two equal ones, and keeps both
        # waits. Merging asserts that a collective has one user.
        def fn(x):
            op, args = getattr(c10d, collective), () if "gather" in collective else ("sum",)
            args += (self.group,) if collective == "all_reduce" else (2, self.group)
            a, b = op(x, *args), op(x, *args)
            c10d.wait_tensor(a)
            c10d.wait_tensor(b)
            return b

        bucket = collective.replace("_into", "").replace("_tensor", "")
        with config.patch({f"bucket_{bucket}s_fx": "all"}):
            compiled = torch.compile(fn, fullgraph=True)
            _, (code,) = run_and_get_code(compiled, torch.ones(4, requires_grad=True))
        for op, count in ((collective, 1), ("wait_tensor", 2)):
            self.assertEqual(len(re.findall(rf"_c10d_functional\.{op}_?\.default\(", code)), count)


class TestFSDP(FakeGroupTestCase):
    def test_dedup_reduce_scatters(self):
        def fn(x, y):
            return self.reduce_scatter(x) + self.reduce_scatter(y)

        gm = functional_graph(fn, ones(4), ones(4))
        with fake_mode(gm):
            fsdp.dedup_fsdp_reduce_scatter(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    add_tensor = aten.add.Tensor(arg0_1, arg1_1)
    reduce_scatter_tensor_default = _c10d_functional.reduce_scatter_tensor.default(add_tensor, 'sum', 2, '0')
    _wait_tensor_functional_default = _c10d_functional._wait_tensor_functional.default(reduce_scatter_tensor_default)
    return (_wait_tensor_functional_default,)""")

    def test_dedup_to_a_fixpoint(self):
        # The waits that one round makes are matched by the next.
        def fn(x, y, z):
            scatter = self.reduce_scatter
            return scatter(x) + scatter(y) + scatter(z)

        gm = functional_graph(fn, ones(4), ones(4), ones(4))
        with fake_mode(gm):
            fsdp.dedup_fsdp_reduce_scatter(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1, arg2_1):
    add_tensor = aten.add.Tensor(arg0_1, arg1_1)
    add_tensor_1 = aten.add.Tensor(add_tensor, arg2_1)
    reduce_scatter_tensor_default_1 = _c10d_functional.reduce_scatter_tensor.default(add_tensor_1, 'sum', 2, '0')
    _wait_tensor_functional_default_1 = _c10d_functional._wait_tensor_functional.default(reduce_scatter_tensor_default_1)
    return (_wait_tensor_functional_default_1,)""")

    def layers(self):
        def fn(x, v, w):
            v, w = self.all_gather(v), self.all_gather(w)
            y = x @ v @ w
            return (
                self.reduce_scatter(y + 1),
                self.reduce_scatter(y + 2),
                self.all_reduce(y + 3),
                self.all_reduce(y + 4),
            )

        return functional_graph(fn, ones(4, 4), ones(2, 4), ones(2, 4))

    def collectives_and_waits(self, gm):
        gm.graph.lint()
        self.assertEqual(targets(gm), {FUNCTIONAL})
        return "\n".join(n.name for n in gm.graph.nodes if "c10d" in str(n.target))

    def test_bucket_all_gathers(self):
        gm = self.layers()
        fsdp.bucket_fsdp_all_gather(gm)
        self.assertExpectedInline(self.collectives_and_waits(gm), """\
all_gather_into_tensor_out
wait_tensor_6
reduce_scatter_tensor
wait_tensor_2
reduce_scatter_tensor_1
wait_tensor_3
all_reduce
wait_tensor_4
all_reduce_1
wait_tensor_5""")

    def test_bucket_reduce_scatters(self):
        gm = self.layers()
        fsdp.bucket_fsdp_reduce_scatter(gm)
        self.assertExpectedInline(self.collectives_and_waits(gm), """\
all_gather_into_tensor
wait_tensor
all_gather_into_tensor_1
wait_tensor_1
reduce_scatter_tensor_2
wait_tensor_6
all_reduce
wait_tensor_4
all_reduce_1
wait_tensor_5""")

    def test_bucket_all_reduces(self):
        gm = self.layers()
        fsdp.bucket_fsdp_all_reduce(gm)
        self.assertExpectedInline(self.collectives_and_waits(gm), """\
all_gather_into_tensor
wait_tensor
all_gather_into_tensor_1
wait_tensor_1
reduce_scatter_tensor
wait_tensor_2
reduce_scatter_tensor_1
wait_tensor_3
all_reduce_2
wait_tensor_6""")

    def test_pre_bucketing(self):
        gm = self.layers()
        fsdp.pre_bucket_fsdp_collectives(gm)
        self.assertExpectedInline(self.collectives_and_waits(gm), """\
all_gather_into_tensor_out
wait_tensor_6
reduce_scatter_tensor_2
wait_tensor_7
all_reduce_2
wait_tensor_8""")

    def test_post_grad(self):
        code = self.after_post_grad(
            self.layers(),
            bucket_all_gathers_fx="fsdp",
            bucket_reduce_scatters_fx="fsdp",
            dedup_reduce_scatters=True,
        )
        FileCheck().check("all_gather_into_tensor_out").check("wait_tensor").check(
            "reduce_scatter_tensor"
        ).check("wait_tensor").run(code)


class TestDDPFusion(FakeGroupTestCase):
    def gradients(self):
        def fn(x, y):
            return self.all_reduce(x * 2 / 2), self.all_reduce(y * 3 / 2)

        return functional_graph(fn, ones(4, 4), ones(2, 4))

    def fused(self, name):
        gm = self.gradients()
        with fake_mode(gm):
            ddp_fusion.fuse_ddp_communication(gm.graph, [name], bucket_size_mb=25)
            post_grad.stable_topological_sort(gm.graph)
        return ir(gm)

    def test_concatenated(self):
        self.assertExpectedInline(self.fused("fuse_ddp_with_concat_op"), """\
def forward(self, arg0_1, arg1_1):
    mul = aten.mul.Tensor(arg0_1, 2)
    mul_1 = aten.mul.Tensor(arg1_1, 3)
    flatten_using_ints = aten.flatten.using_ints(mul)
    flatten_using_ints_1 = aten.flatten.using_ints(mul_1)
    cat = aten.cat([flatten_using_ints, flatten_using_ints_1])
    div_tensor = aten.div.Tensor(cat, 2)
    all_reduce_default = _c10d_functional.all_reduce.default(div_tensor, 'sum', '0')
    _wait_tensor_functional_default = _c10d_functional._wait_tensor_functional.default(all_reduce_default)
    split = aten.split(_wait_tensor_functional_default, [16, 8])
    getitem_1 = split[1]
    reshape_1 = aten.reshape(getitem_1, (2, 4))
    getitem = split[0]
    reshape = aten.reshape(getitem, (4, 4))
    return (reshape, reshape_1)""")

    def test_coalesced(self):
        self.assertExpectedInline(self.fused("fuse_ddp_with_coalesced_op"), """\
def forward(self, arg0_1, arg1_1):
    mul = aten.mul.Tensor(arg0_1, 2)
    mul_1 = aten.mul.Tensor(arg1_1, 3)
    _foreach_div_scalar = aten._foreach_div.Scalar([mul, mul_1], 2)
    all_reduce_coalesced_default = _c10d_functional.all_reduce_coalesced.default(_foreach_div_scalar, 'sum', '0')
    getitem = all_reduce_coalesced_default[0]
    getitem_1 = all_reduce_coalesced_default[1]
    _wait_tensor_functional_default = _c10d_functional._wait_tensor_functional.default(getitem)
    _wait_tensor_functional_default_1 = _c10d_functional._wait_tensor_functional.default(getitem_1)
    return (_wait_tensor_functional_default, _wait_tensor_functional_default_1)""")

    def test_a_wait_is_delayed_until_its_first_use(self):
        def fn(x):
            w = self.all_reduce(x)
            z = x @ x
            return w + 1, z

        gm = functional_graph(fn, ones(4, 4))
        ddp_fusion.schedule_comm_wait(gm.graph)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1):
    all_reduce = _c10d_functional.all_reduce.default(arg0_1, 'sum', '0')
    mm = aten.mm.default(arg0_1, arg0_1)
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_reduce)
    add = aten.add.Tensor(wait_tensor, 1)
    return (add, mm)""")

    def test_coalesced_waits_are_delayed(self):
        def fn(x, y):
            v, w = funcol.all_reduce_coalesced([x, y], "sum", self.group)
            z = y @ y
            return v + z, w

        gm = functional_graph(fn, ones(4, 4), ones(4, 4))
        ddp_fusion.schedule_comm_wait(gm.graph)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    all_reduce_coalesced = _c10d_functional.all_reduce_coalesced.default([arg0_1, arg1_1], 'sum', '0')
    getitem = all_reduce_coalesced[0]
    getitem_1 = all_reduce_coalesced[1]
    mm = aten.mm.default(arg1_1, arg1_1)
    wait_tensor_1 = _c10d_functional._wait_tensor_functional.default(getitem_1)
    wait_tensor = _c10d_functional._wait_tensor_functional.default(getitem)
    add = aten.add.Tensor(wait_tensor, mm)
    return (add, wait_tensor_1)""")

    @parametrize("fusion", ["fuse_ddp_with_concat_op", "fuse_ddp_with_coalesced_op"])
    def test_post_grad(self, fusion):
        code = self.after_post_grad(
            self.gradients(),
            _fuse_ddp_communication=True,
            _fuse_ddp_communication_passes=[fusion, "schedule_comm_wait"],
        )
        FileCheck().check_count("c10d_functional.all_reduce", 1, exactly=True).run(code)


class TestMicroPipelineTP(FakeGroupTestCase):
    def setUp(self):
        super().setUp()
        # What is asked for before fusing; nothing here runs.
        self.enter(symm_mem_test_mode())
        self.enter(unittest.mock.patch.object(dist, "is_nccl_available", lambda: True))

    def graph(self, fn, *args):
        gm = functional_graph(fn, *args, decompositions=select_decomp_table())
        gm.graph = fx_graph_cse(gm.graph)
        post_grad.remove_noop_ops(gm.graph)
        view_to_reshape(gm)
        return gm

    def fused(self, fn, *args):
        gm = self.graph(fn, *args)
        micro_pipeline_tp.micro_pipeline_tp_pass(gm.graph)
        return ir(gm)

    def test_all_gather_matmul(self):
        code = self.fused(lambda x, w: self.all_gather(x) @ w, ones(2, 8), ones(8, 4))
        self.assertExpectedInline(code, """\
def forward(self, arg0_1, arg1_1):
    inductor_force_stride_order_default = prims.inductor_force_stride_order.default(arg0_1, (8, 1))
    fused_all_gather_matmul_default = symm_mem.fused_all_gather_matmul.default(inductor_force_stride_order_default, [arg1_1], 0, '0', return_A = False)
    getitem_1 = fused_all_gather_matmul_default[1]
    getitem_2 = getitem_1[0]
    return (getitem_2,)""")

    def test_all_gather_matmul_on_dim_1(self):
        code = self.fused(
            lambda x, w: self.all_gather(x, 1) @ w, ones(2, 4, 8), ones(8, 4)
        )
        self.assertExpectedInline(code, """\
def forward(self, arg0_1, arg1_1):
    inductor_force_stride_order_default = prims.inductor_force_stride_order.default(arg0_1, (8, 16, 1))
    fused_all_gather_matmul_default = symm_mem.fused_all_gather_matmul.default(inductor_force_stride_order_default, [arg1_1], 1, '0', return_A = False)
    getitem_3 = fused_all_gather_matmul_default[1]
    getitem_4 = getitem_3[0]
    return (getitem_4,)""")

    def test_all_gather_of_erased_type(self):
        def fn(x):
            return self.all_gather(x.view(torch.uint8)).view(torch.float32)

        gm = self.graph(fn, ones(2, 8))
        (match,) = micro_pipeline_tp.find_all_gather_patterns(gm.graph)
        self.assertIs(match.res_node.target, aten.view.dtype)

    def test_all_gather_matmul_reassembled_by_slices(self):
        def fn(x, w):
            y = self.all_gather(x)
            return torch.cat([y[:2], y[2:]], 1) @ w

        self.assertExpectedInline(self.fused(fn, ones(2, 4, 8), ones(8, 4)), """\
def forward(self, arg0_1, arg1_1):
    inductor_force_stride_order_default = prims.inductor_force_stride_order.default(arg0_1, (8, 16, 1))
    fused_all_gather_matmul_default = symm_mem.fused_all_gather_matmul.default(inductor_force_stride_order_default, [arg1_1], 1, '0', return_A = False)
    getitem_1 = fused_all_gather_matmul_default[1]
    getitem_2 = getitem_1[0]
    return (getitem_2,)""")

    def test_matmul_reduce_scatter(self):
        code = self.fused(
            lambda x, w: self.reduce_scatter(x @ w), ones(4, 8), ones(8, 4)
        )
        self.assertExpectedInline(code, """\
def forward(self, arg0_1, arg1_1):
    inductor_force_stride_order_default = prims.inductor_force_stride_order.default(arg0_1, (8, 1))
    fused_matmul_reduce_scatter_default = symm_mem.fused_matmul_reduce_scatter.default(inductor_force_stride_order_default, arg1_1, 'sum', 0, '0')
    return (fused_matmul_reduce_scatter_default,)""")

    def test_matmul_reduce_scatter_on_dim_1(self):
        code = self.fused(
            lambda x, w: self.reduce_scatter(x @ w, 1), ones(4, 8), ones(8, 4)
        )
        self.assertExpectedInline(code, """\
def forward(self, arg0_1, arg1_1):
    inductor_force_stride_order_default = prims.inductor_force_stride_order.default(arg0_1, (1, 4))
    fused_matmul_reduce_scatter_default = symm_mem.fused_matmul_reduce_scatter.default(inductor_force_stride_order_default, arg1_1, 'sum', 1, '0')
    return (fused_matmul_reduce_scatter_default,)""")

    def test_matmul_reduce_scatter_of_slices(self):
        def fn(x, w):
            y = x @ w
            return self.reduce_scatter(torch.cat([y[:, :2], y[:, 2:]]))

        self.assertExpectedInline(self.fused(fn, ones(4, 8), ones(8, 4)), """\
def forward(self, arg0_1, arg1_1):
    inductor_force_stride_order_default = prims.inductor_force_stride_order.default(arg0_1, (1, 4))
    fused_matmul_reduce_scatter_default = symm_mem.fused_matmul_reduce_scatter.default(inductor_force_stride_order_default, arg1_1, 'sum', 1, '0')
    return (fused_matmul_reduce_scatter_default,)""")

    @parametrize("dim", [0, 1])
    def test_matmul_reduce_scatter_that_is_saved_for_backward(self, dim):
        def fn(x, w):
            y = x @ w
            y = y if dim == 0 else torch.cat(y.split(2, 1))
            y = c10d.reduce_scatter_tensor(y, "sum", 2, self.group)
            return c10d._wait_tensor_functional(y), y

        code = self.fused(fn, ones(4, 8), ones(8, 4))
        FileCheck().check("symm_mem.fused_matmul_reduce_scatter").check_same(
            f"'sum', {dim}"
        ).check("return (").check_not("wait_tensor").run(code)

    def fuses_when_compiled(self, requires_grad):
        def stop(graph):
            raise RuntimeError(ir(graph.owning_module))

        def fn(x, w):
            return self.all_gather(x, 1) @ w

        args = ones(2, 4, 8).requires_grad_(requires_grad), ones(8, 4)
        with (
            config.patch(_micro_pipeline_tp=True, post_grad_custom_post_pass=stop),
            self.assertRaisesRegex(Exception, "symm_mem.fused_all_gather_matmul"),
        ):
            torch.compile(fn, fullgraph=True)(*args)

    def test_compiled_training(self):
        self.fuses_when_compiled(requires_grad=True)

    # Functionalization replays a split of a waited tensor for each of its results;
    # AOTAutograd makes the pattern's one split of these again.
    def test_compiled_inference(self):
        self.fuses_when_compiled(requires_grad=False)


class TestLowContention(FakeGroupTestCase):
    @parametrize("collective", ["all_gather", "reduce_scatter"])
    def test_a_wait_is_known_by_its_target(self, collective):
        # What is between a collective and its wait decides whether to replace it.
        def fn(x, y):
            if collective == "all_gather":
                z = c10d.all_gather_into_tensor(x, 2, self.group)
            else:
                z = c10d.reduce_scatter_tensor(x, "sum", 2, self.group)
            return y @ y, c10d.wait_tensor(z)

        gm = functional_graph(fn, ones(4, 4), ones(4, 4))
        (wait,) = waits(gm)
        wait._rename("w")
        any_size = "aten_distributed_optimizations.low_contention_min_bytes_per_rank"
        with symm_mem_test_mode(), config.patch({any_size: 0}):
            replace_collectives_with_low_contention(gm.graph)
        FileCheck().check(f"symm_mem._low_contention_{collective}").check(
            "aten.mm"
        ).check("w = _c10d_functional._wait_tensor_functional").run(ir(gm))


class TestDecompComms(FakeGroupTestCase):
    def test_gram_matrices(self):
        def fn(shard):
            x = self.all_gather(shard)
            x = x / x.norm()
            x = x @ (x.t() @ x)
            x = x @ (x.t() @ x)
            return x.split(4)[0]

        gm = functional_graph(fn, ones(4, 2))
        with fake_mode(gm):
            decomp_comms.decomp_comms(gm)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1):
    linalg_vector_norm = aten.linalg_vector_norm.default(arg0_1)
    pow_tensor_scalar = aten.pow.Tensor_Scalar(linalg_vector_norm, 2.0)
    all_reduce_default_2 = _c10d_functional.all_reduce.default(pow_tensor_scalar, 'sum', '0')
    _wait_tensor_functional_default_2 = _c10d_functional._wait_tensor_functional.default(all_reduce_default_2)
    pow_tensor_scalar_1 = aten.pow.Tensor_Scalar(_wait_tensor_functional_default_2, 0.5)
    div = aten.div.Tensor(arg0_1, pow_tensor_scalar_1)
    t = aten.t.default(div)
    mm = aten.mm.default(t, div)
    all_reduce_default = _c10d_functional.all_reduce.default(mm, 'sum', '0')
    _wait_tensor_functional_default = _c10d_functional._wait_tensor_functional.default(all_reduce_default)
    mm_1 = aten.mm.default(div, _wait_tensor_functional_default)
    t_1 = aten.t.default(mm_1)
    mm_2 = aten.mm.default(t_1, mm_1)
    all_reduce_default_1 = _c10d_functional.all_reduce.default(mm_2, 'sum', '0')
    _wait_tensor_functional_default_1 = _c10d_functional._wait_tensor_functional.default(all_reduce_default_1)
    mm_3 = aten.mm.default(mm_1, _wait_tensor_functional_default_1)
    return (mm_3,)""")


class TestOverlapScheduling(FakeGroupTestCase):
    def setUp(self):
        super().setUp()
        # The roofline of a device that is not there.
        self.enter(
            unittest.mock.patch.object(
                overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0
            )
        )

    def gathered_early_used_late(self):
        def fn(x, y):
            v = self.all_gather(x)
            w = self.all_gather(x + 1)
            z = y @ y
            return z @ z, v, w

        return functional_graph(fn, ones(4, 4), ones(4, 4))

    @staticmethod
    def estimate(node, override_size=None):
        return float(node.target is aten.mm.default or "all_gather" in node.name)

    def scheduled(self, **kwargs):
        return overlap_scheduling.schedule_overlap_bucketing(
            self.gathered_early_used_late(),
            custom_runtime_estimation=self.estimate,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives=False,
            **kwargs,
        )

    def test_waits_move_behind_what_hides_them(self):
        self.assertExpectedInline(ir(self.scheduled()), """\
def forward(self, arg0_1, arg1_1):
    all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(arg0_1, 2, '0')
    mm = aten.mm.default(arg1_1, arg1_1)
    wait_tensor = _c10d_functional._wait_tensor_functional.default(all_gather_into_tensor)
    add = aten.add.Tensor(arg0_1, 1)
    all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(add, 2, '0')
    mm_1 = aten.mm.default(mm, mm)
    wait_tensor_1 = _c10d_functional._wait_tensor_functional.default(all_gather_into_tensor_1)
    return (mm_1, wait_tensor, wait_tensor_1)""")

    def test_buckets_preserve_the_overlap(self):
        gm = self.scheduled(collective_bucketing=True)
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    empty = aten.empty.memory_format([64], dtype = torch.float32, device = device(type='cpu'), pin_memory = False)
    slice_1 = aten.slice.Tensor(empty, 0, 0, 32)
    view = aten.view.default(arg0_1, [-1])
    add = aten.add.Tensor(arg0_1, 1)
    view_1 = aten.view.default(add, [-1])
    cat = aten.cat.default([view, view_1])
    copy_ = aten.copy_.default(slice_1, cat)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(copy_, 2, '0', out = empty)
    mm = aten.mm.default(arg1_1, arg1_1)
    mm_1 = aten.mm.default(mm, mm)
    wait_tensor_2 = _c10d_functional._wait_tensor_functional.default(all_gather_into_tensor_out)
    view_2 = aten.view.default(wait_tensor_2, [2, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [16, 16], 1)
    getitem = split_with_sizes[0]
    clone = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view = aten._unsafe_view.default(clone, [8, 4])
    getitem_1 = split_with_sizes[1]
    clone_1 = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    _unsafe_view_1 = aten._unsafe_view.default(clone_1, [8, 4])
    return (mm_1, _unsafe_view, _unsafe_view_1)""")

    def test_control_deps(self):
        gm = self.scheduled(insert_overlap_deps=True)
        self.assertEqual(targets(gm), {FUNCTIONAL})
        self.assertExpectedInline(ir(gm), """\
def forward(self, arg0_1, arg1_1):
    all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(arg0_1, 2, '0')
    subgraph_mm = self.subgraph_mm
    mm = higher_order.control_deps((all_gather_into_tensor,), subgraph_mm, arg1_1)
    subgraph_wait_tensor = self.subgraph_wait_tensor
    wait_tensor = higher_order.control_deps((mm,), subgraph_wait_tensor, all_gather_into_tensor)
    add = aten.add.Tensor(arg0_1, 1)
    all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(add, 2, '0')
    subgraph_mm_1 = self.subgraph_mm_1
    mm_1 = higher_order.control_deps((all_gather_into_tensor_1,), subgraph_mm_1, mm)
    subgraph_wait_tensor_1 = self.subgraph_wait_tensor_1
    wait_tensor_1 = higher_order.control_deps((mm_1,), subgraph_wait_tensor_1, all_gather_into_tensor_1)
    return (mm_1, wait_tensor, wait_tensor_1)""")

    def test_post_grad(self):
        gm = self.gathered_early_used_late()
        options = {
            "enable_overlap_scheduling": True,
            "custom_runtime_estimation": self.estimate,
            "compute_estimator": "analytical",
            "enable_fusion_regions": False,
            "pre_bucketing_fsdp_collectives": False,
        }
        prefix = "aten_distributed_optimizations."
        code = self.after_post_grad(gm, **{prefix + k: v for k, v in options.items()})
        code += "\n\n" + ir(gm.subgraph_wait_tensor)
        self.assertExpectedInline(code, """\
def forward(self, arg0_1, arg1_1):
    all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(arg0_1, 2, '0')
    subgraph_mm = self.subgraph_mm
    mm = higher_order.control_deps((all_gather_into_tensor,), subgraph_mm, arg1_1)
    add = aten.add.Tensor(arg0_1, 1)
    subgraph_all_gather_into_tensor_1 = self.subgraph_all_gather_into_tensor_1
    all_gather_into_tensor_1 = higher_order.control_deps((mm,), subgraph_all_gather_into_tensor_1, add)
    subgraph_mm_1 = self.subgraph_mm_1
    mm_1 = higher_order.control_deps((all_gather_into_tensor_1,), subgraph_mm_1, mm)
    subgraph_wait_tensor = self.subgraph_wait_tensor
    wait_tensor = higher_order.control_deps((mm_1, mm), subgraph_wait_tensor, all_gather_into_tensor)
    subgraph_wait_tensor_1 = self.subgraph_wait_tensor_1
    wait_tensor_1 = higher_order.control_deps((mm_1,), subgraph_wait_tensor_1, all_gather_into_tensor_1)
    return (mm_1, wait_tensor, wait_tensor_1)

def forward(self, arg_0):
    _wait_tensor_functional_default = _c10d_functional.wait_tensor.default(arg_0)
    return _wait_tensor_functional_default""")


class TestEstimates(FakeGroupTestCase):
    def graph(self):
        return functional_graph(
            lambda x: (self.all_gather(x), self.all_reduce(x)), ones(4, 4)
        )

    def test_collectives_are_found_by_their_waits(self):
        no_other = unittest.mock.patch.object(
            overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0
        )
        with no_other:
            found = overlap_scheduling.gather_node_runtime_estimations(self.graph())
        names = [node.name for node in found]
        self.assertEqual(names, ["all_gather_into_tensor", "all_reduce"])

    def test_one_collective(self):
        gm = functional_graph(self.all_gather, ones(4, 4))
        node, _ = (n for n in gm.graph.nodes if "c10d" in str(n.target))
        self.assertEqual(estimate_fx_collective_size(node), 4 * (16 + 32))
        ms = estimate_nccl_collective_runtime_from_fx_node(node)
        self.assertGreater(ms, 0)
        estimates = node_runtime_estimation._get_collective_estimations(node)
        self.assertEqual(estimates, (ms, ms))

    def test_benchmarks_are_logged(self):
        patch = functools.partial(unittest.mock.patch.object, node_runtime_estimation)
        with (
            patch("benchmark_collective_with_cuda_events", lambda *_, **__: (1.0, "")),
            patch("_log_collective_benchmarks") as log,
        ):
            node_runtime_estimation._log_graph_collective_benchmarks(self.graph(), "")
        names = [node.name for node in log.call_args.args[0]]
        self.assertEqual(names, ["all_gather_into_tensor", "all_reduce"])


class TestMemoryTools(FakeGroupTestCase):
    def setUp(self):
        super().setUp()
        self.mesh = init_device_mesh("cpu", (2,))

    def bytes_counted(self, make_tracker, wait):
        with FakeTensorMode(), make_tracker() as tracker:
            y = c10d.all_reduce(torch.ones(1024), "sum", self.group)
            w = wait(y)
            (snapshot,) = tracker.get_tracker_snapshot("current").values()
        del w
        return snapshot["Total"]

    def fsdp_tracker(self):
        model = fully_shard(torch.nn.Linear(1, 1), mesh=self.mesh)
        return FSDPMemTracker(model, torch.optim.SGD(model.parameters()))

    @parametrize("tracker", ["MemTracker", "FSDPMemTracker"])
    def test_a_wait_needs_no_memory(self, tracker):
        make = MemTracker if tracker == "MemTracker" else self.fsdp_tracker
        unwaited = self.bytes_counted(make, lambda y: y)
        self.assertGreaterEqual(unwaited, 4096)
        self.assertEqual(self.bytes_counted(make, c10d.wait_tensor), unwaited)
        functional = self.bytes_counted(make, c10d._wait_tensor_functional)
        self.assertEqual(functional, unwaited + 4096)

    def test_both_waits_are_collectives_that_synchronize(self):
        for op in (WAIT, FUNCTIONAL):
            self.assertIn(op, fake_collectives.functional_collectives)
            self.assertIn(op, fake_collectives.collective_ops)
            self.assertIn(op, fake_collectives.sync_ops)


class TestShardsWrapper(FakeGroupTestCase):
    @parametrize("op", [WAIT, FUNCTIONAL])
    def test_both_waits(self, op):
        t = ones(2, 2)
        # An all-gather takes the shards and leaves a plain tensor to wait for.
        result = LocalShardsWrapper.__torch_dispatch__(op, (LocalShardsWrapper,), (t,))
        self.assertEqual(result, t)
        self.assertEqual(result is t, op is WAIT)


class TestDebugModes(FakeGroupTestCase):
    def test_debug_mode(self):
        gm = functional_graph(lambda x: self.all_reduce(x), ones(4))
        x = ones(4)
        with DebugMode() as mode:
            gm(x)
            c10d.wait_tensor(x)
        self.assertExpectedInline(mode.debug_string(), """\
    _c10d_functional::all_reduce(t: f32[4], sum, 0)  ->  t: f32[4]
    _c10d_functional::_wait_tensor_functional(t: f32[4])  ->  t: f32[4]
    _c10d_functional::wait_tensor(t: f32[4])  ->  t: f32[4]""")

    def test_comm_debug_mode(self):
        gm = functional_graph(lambda x: self.all_reduce(x), ones(4))
        with CommDebugMode() as mode:
            gm(ones(4))
        self.assertEqual(mode.get_total_counts(), 1)

    @parametrize("op", [WAIT, FUNCTIONAL])
    def test_local_tensor(self, op):
        with LocalTensorMode(2):
            x = LocalTensor({0: ones(2), 1: 2 * ones(2)})
            y = c10d.all_reduce(x, "sum", self.group)
            waited = op(y)
        self.assertEqual(waited is y, op is WAIT)
        for rank in range(2):
            self.assertEqual(waited._local_tensors[rank], 3 * ones(2))


class TestCppWrapper(TestCase):
    def test_the_handle_that_a_wait_returns_is_deleted(self):
        with lazy_group() as group, config.patch(cpp_wrapper=True):
            compiled = torch.compile(
                lambda x: funcol.all_reduce(x, "sum", group) + 1, fullgraph=True
            )
            result, (code, *_) = run_and_get_code(compiled, ones(4))
        self.assertEqual(result, 2 * ones(4))
        self.assertRegex(
            code,
            r"c10d_functional_wait_tensor\(buf\d+, &(buf\d+_handle)\)\);\n"
            r".*aoti_torch_delete_tensor_object\(\1\)",
        )


class TestStandaloneCompile(TestCase):
    def traced(self):
        def fn(x):
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        with fake_group():
            return make_fx(fn, tracing_mode="fake")(ones(4))

    def test_functionalized_collectives(self):
        gm = _functionalize_inplace_collectives(self.traced())
        self.assertExpectedInline(ir(gm), """\
def forward(self, x_1):
    mul = aten.mul.Tensor(x_1, 2)
    _torchbind_obj0 = self._torchbind_obj0
    all_reduce_default = _c10d_functional.all_reduce.default(mul, 'sum', _torchbind_obj0)
    wait_tensor_default = _c10d_functional.wait_tensor.default(all_reduce_default)
    copy__default = aten.copy_.default(mul, wait_tensor_default)
    add = aten.add.Tensor(wait_tensor_default, 1)
    return add""")

    def test_values(self):
        gm = self.traced()
        with lazy_group():
            gm._torchbind_obj0 = dist.group.WORLD.boxed()
            compiled, (code, *_) = run_and_get_code(
                torch._inductor.standalone_compile, gm, [ones(4)]
            )
            self.assertEqual(compiled(ones(4)), 3 * ones(4))
        FileCheck().check("all_reduce_.default(").check(
            "_c10d_functional.wait_tensor.default("
        ).run(code[code.index("def call(") :])


for case in (
    TestBucketing,
    TestDDPFusion,
    TestDebugModes,
    TestLowContention,
    TestMemoryTools,
    TestMicroPipelineTP,
    TestPartitioners,
    TestShardsWrapper,
):
    instantiate_parametrized_tests(case)

if __name__ == "__main__":
    run_tests()
