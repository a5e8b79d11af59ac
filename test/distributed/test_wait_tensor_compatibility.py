# Owner(s): ["oncall: distributed"]

"""Programs with waits that work on stock torch work alike on the patched one; docs/compatibility.md lists them.

Each question runs on one lazy rank, whose results are NaN until they are waited for, and its answer
ends with the number of collectives that nobody waited for. Where the two torches are to differ, both
answers stand in DIFFERENT.
"""

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DeviceMesh, distribute_tensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


sys.path.insert(0, str(Path(__file__).parent))
from lazy_process_group import issued, lazy_group, pending, work_registry_size
from side_by_side import answer, ask_stock, describe, print_answers, Table
from stock_torch import require_patched


c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default


def reduced(x):
    """An all-reduce in flight; its one rank's result is ``x``."""
    return c10d.all_reduce(x, "sum", dist.group.WORLD.group_name)


def waited(x):
    return c10d.wait_tensor(reduced(x * 2))


def waited_and_ignored(x):
    y = reduced(x * 2)
    c10d.wait_tensor(y)
    return y


def square(x):
    return waited(x).pow(2).sum()


def ones(*size, **kwargs):
    return torch.ones(*size or (3,), **kwargs)


def leaf(*size):
    return ones(*size, requires_grad=True)


@contextmanager
def one_rank(backend):
    """A group of one rank: gloo where the lazy group does not do what a question is about."""
    torch._dynamo.reset()
    if backend == "lazy":
        with lazy_group(allow_pending=True) as group:
            yield group
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1 if backend == "gloo" else 2)
        try:
            yield dist.group.WORLD.group_name
        finally:
            dist.destroy_process_group()


ask = Table()


def on_one_rank(question, backend):
    def run():
        with one_rank(backend):
            before = work_registry_size()
            return [describe(question()), f"{work_registry_size() - before} pending"]

    run.__name__ = question.__name__
    return run


def asks(question=None, *, backend="lazy"):
    """Enters a question in the table, to be asked on one rank."""
    if question is None:
        return partial(asks, backend=backend)
    ask(on_one_rank(question, backend))
    return question


def asks_each(backend="lazy", **variants):
    """The same for a function of one argument, once for each value."""

    def enter(question):
        for name, value in variants.items():
            variant = partial(question, value)
            variant.__name__ = f"{question.__name__}_{name}"
            asks(variant, backend=backend)
        return question

    return enter


# --- autograd -------------------------------------------------------------------


@asks
def gradcheck():
    x = torch.linspace(0.1, 1, 3, dtype=torch.float64, requires_grad=True)
    return [torch.autograd.gradcheck(waited, x), torch.autograd.gradgradcheck(lambda x: waited(x).pow(3), x)]


@asks_each(used=waited, ignored=waited_and_ignored)
def hooks(fn):
    seen = []
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda x: seen.append(["leaf", x.grad]))
    y = fn(x)
    y.register_hook(lambda grad: seen.append(["waited", grad]))
    y.register_hook(lambda grad: grad * 3)
    (y * y).sum().backward()
    return seen


@asks
def retains_grad():
    y = waited(leaf())
    y.retain_grad()
    (y * y).sum().backward()
    return y.grad


@asks
def saved_tensor_hooks():
    x, packed = leaf(), []

    def pack(t):
        packed.append(list(t.shape))
        return t.numpy(force=True).copy()

    with saved_tensors_hooks(pack, torch.from_numpy):
        loss = square(x)
    loss.backward()
    return [packed, x.grad]


@asks
def saved_before_the_wait():
    w, y = leaf(), reduced(ones())
    z = w * y
    c10d.wait_tensor(y)
    z.sum().backward()
    return [w.grad, y._version]


@asks
def a_wait_on_a_saved_input_of_a_view():
    x = leaf(4)
    y = reduced(x * 2)
    z = y.view(2, 2).exp()
    c10d.wait_tensor(y)
    (z.isnan() * 1.0 + y.view(2, 2) * 3).sum().backward()
    return x.grad


@asks_each(reentrant=True, not_reentrant=False)
def checkpointed(reentrant):
    x = leaf()
    checkpoint(square, x, use_reentrant=reentrant).backward()
    return [x.grad, issued()]


POLICIES = {
    "wait": [WAIT],
    "both": [c10d.all_reduce.default, WAIT],
    "collective": [c10d.all_reduce.default],
}


def selectively_checkpointed(policy, way=lambda fn: fn, fn=waited):
    context = partial(create_selective_checkpoint_contexts, POLICIES[policy])
    x = leaf()

    @way
    def loss(x):
        return checkpoint(lambda x: fn(x).pow(2).sin().sum(), x, use_reentrant=False, context_fn=context)

    loss(x).backward()
    return x.grad


@asks_each(**{policy: policy for policy in POLICIES})
def selective_checkpoint(policy):
    return [selectively_checkpointed(policy), issued()]


@asks_each(**{policy: policy for policy in POLICIES})
def selective_checkpoint_of_an_async_tensor(policy):
    def fn(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD)

    return selectively_checkpointed(policy, fn=fn)


@asks_each(**{policy: policy for policy in POLICIES})
def selective_checkpoint_compiled(policy):
    # What is computed twice is what the policy says.
    way = partial(torch.compile, backend="aot_eager", fullgraph=True)
    return [selectively_checkpointed(policy, way), issued()]


@asks
def selective_checkpoint_of_an_ignored_wait():
    return selectively_checkpointed("wait", fn=waited_and_ignored)


@asks
def compiled_autograd():
    x = leaf()
    loss = square(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    return x.grad


@asks
def compiled_autograd_with_a_wait_in_a_hook():
    x = leaf()
    x.register_hook(waited)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        (x * x).sum().backward()
    return x.grad


@asks
def a_double_wait_gives_one_gradient():
    x = leaf()
    y = waited(x)
    (c10d.wait_tensor(y) + c10d.wait_tensor(y)).sum().backward()
    return x.grad


@asks
def anomaly_mode():
    x = leaf()
    with torch.autograd.detect_anomaly(check_nan=False):
        square(x).backward()
    return x.grad


# --- torch.func -----------------------------------------------------------------


@asks
def func_functionalize():
    return torch.func.functionalize(waited)(ones())


@asks
def func_functionalize_removes_views():
    return torch.func.functionalize(lambda x: waited(x)[1:] * 2, remove="mutations_and_views")(ones())


def doubled(x):
    return c10d.wait_tensor(x * 2)


def doubled_ignored(x):
    y = x * 2
    c10d.wait_tensor(y)
    return y


BOTH = {"used": doubled, "ignored": doubled_ignored}


def cube(fn, x):
    return fn(x).pow(3).sum()


@asks
def func_grad_of_a_collective():
    return torch.func.grad(square)(ones())


@asks_each(**BOTH)
def func_grad(fn):
    return torch.func.grad(partial(cube, fn))(ones())


@asks_each(**BOTH)
def func_grad_twice(fn):
    return torch.func.grad(lambda x: torch.func.grad(partial(cube, fn))(x).sum())(ones())


@asks_each(**BOTH)
def func_grad_compiled(fn):
    return torch.compile(torch.func.grad(partial(cube, fn)), backend="aot_eager", fullgraph=True)(ones())


@asks_each(**BOTH)
def func_grad_of_functionalized(fn):
    return torch.func.grad(torch.func.functionalize(partial(cube, fn)))(ones())


@asks_each(**BOTH)
def func_functionalized_grad(fn):
    return torch.func.functionalize(torch.func.grad(partial(cube, fn)))(ones())


@asks_each(**BOTH)
def func_vjp(fn):
    y, vjp = torch.func.vjp(fn, ones())
    return [y, vjp(ones())]


@asks_each(**BOTH)
def func_jacrev(fn):
    return torch.func.jacrev(fn)(ones())


@asks_each(**BOTH)
def func_hessian(fn):
    return torch.func.hessian(partial(cube, fn))(ones())


@asks_each(**BOTH)
def func_jvp(fn):
    return torch.func.jvp(fn, (ones(),), (ones(),))


@asks_each(**BOTH)
def forward_mode(fn):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(ones(), ones() * 5)
        return torch.autograd.forward_ad.unpack_dual(fn(x)).tangent


@asks_each(**BOTH)
def func_vmap(fn):
    return torch.func.vmap(fn)(ones(2, 3))


@asks_each(**BOTH)
def func_vmap_of_grad(fn):
    return torch.func.vmap(torch.func.grad(partial(cube, fn)))(ones(2, 3))


@asks
def func_vmap_of_a_collective():
    return torch.func.vmap(waited)(ones(2, 3))


@asks
def make_fx_of_func_grad():
    return make_fx(torch.func.grad(partial(cube, doubled)))(ones())(ones())


# --- dispatch modes and subclasses ----------------------------------------------


@asks_each(
    plain=lambda x: x,
    transposed=lambda x: x.t(),
    strided=lambda x: x[:, ::2],
    offset=lambda x: x[1:, 1:],
    expanded=lambda x: x[:1].expand(4, 6),
)
def fake_geometry(view):
    with FakeTensorMode():
        x = view(torch.empty(4, 6))
        y = c10d.wait_tensor(x)
    return [list(y.shape), list(y.stride()), type(y).__name__]


@asks_each(
    plain=lambda x: x,
    transposed=lambda x: x.t(),
    strided=lambda x: x[:, ::2],
)
def meta_geometry(view):
    x = view(torch.empty(4, 6, device="meta"))
    y = c10d.wait_tensor(x)
    return [list(y.shape), list(y.stride()), str(y.device)]


@asks
def functional_tensor_mode():
    x = ones()
    with FunctionalTensorMode():
        y = waited(FunctionalTensor.to_functional(x))
        torch._sync(y)
        return [type(y).__name__, torch._from_functional_tensor(y.elem)]


@asks_each(real="real", fake="fake", symbolic="symbolic")
def make_fx_runs(tracing_mode):
    gm = make_fx(lambda x: waited(x) + waited_and_ignored(x), tracing_mode=tracing_mode)(ones())
    names = [n.name for n in gm.graph.nodes if "wait_tensor" in n.name]
    return [names, gm(ones())]


@asks
def make_fx_of_a_gradient():
    def fn(x):
        return torch.autograd.grad(square(x), x)

    return make_fx(fn)(leaf())(leaf())


@asks
def schema_check_mode():
    with SchemaCheckMode():
        return waited(ones())


@asks
def debug_mode():
    with DebugMode() as mode:
        waited(ones())
    return mode.debug_string().splitlines()


@asks
def comm_debug_mode():
    with CommDebugMode() as mode:
        waited(ones())
    return [mode.get_total_counts(), {str(k): v for k, v in mode.get_comm_counts().items()}]


@asks(backend="fake")
def local_tensor():
    with LocalTensorMode(2):
        y = waited(LocalTensor({0: ones(), 1: 2 * ones()}))
    return [type(y).__name__, [y._local_tensors[rank] for rank in range(2)]]


def redistributed(x):
    mesh = DeviceMesh("cpu", [0])
    y = distribute_tensor(x, mesh, [Shard(0)]) * 2
    y = y.redistribute(placements=[Replicate()])
    partial_sum = torch.distributed.tensor.DTensor.from_local(y.to_local(), mesh, [Partial()])
    return partial_sum.redistribute(placements=[Replicate()]).to_local()


@asks_each(backend="gloo", eager=lambda fn: fn, compiled=lambda fn: torch.compile(fn, backend="aot_eager"))
def dtensor(way):
    x = leaf(4)
    y = way(redistributed)(x)
    kind = type(y).__name__
    (y * y).sum().backward()
    return [kind, y * 1, x.grad]


@asks_each(eager=lambda fn: fn, compiled=lambda fn: torch.compile(fn, backend="aot_eager"))
def two_tensor(way):
    x = TwoTensor(ones(), 2 * ones()).requires_grad_()
    y = way(waited)(x)
    (y * y).sum().backward()
    return [type(y).__name__, y.a, y.b, x.grad.a, x.grad.b]


@asks_each(eager=lambda fn: fn, compiled=lambda fn: torch.compile(fn, backend="aot_eager"))
def two_tensor_of_two_tensors(way):
    x = TwoTensor(TwoTensor(ones(), 2 * ones()), TwoTensor(3 * ones(), 4 * ones())).requires_grad_()
    y = way(waited)(x)
    (y * y).sum().backward()
    return [y.a.a, y.a.b, y.b.a, y.b.b, x.grad.a.a, x.grad.b.b]


class Wrapper(torch.Tensor):
    """A subclass that wraps whatever an operator returns, as many do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = partial(torch.utils._pytree.tree_map_only, cls, lambda t: t.inner)
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, out)


@asks
def wrapper_that_does_not_correct_aliasing():
    x = Wrapper(ones()).requires_grad_()
    y = waited(x)
    (y * y).sum().backward()
    return [type(y).__name__, y.inner, x.grad.inner]


# --- asynchronous tensors -------------------------------------------------------


@asks
def async_tensor_stays_pending_through_views():
    y = funcol.all_reduce(ones(4), "sum", dist.group.WORLD)
    before = pending()
    view = y.view(2, 2).t()
    return [before, type(view).__name__, pending(), view + 1, pending()]


@asks
def async_tensor_waits():
    y = funcol.all_reduce(ones(4), "sum", dist.group.WORLD)
    a = y.wait()
    return [type(a).__name__, a is y.elem, funcol.wait_tensor(y) is y.elem, type(funcol.wait_tensor(y)).__name__]


@asks
def async_tensor_with_grad():
    x = leaf(4)
    y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
    kinds = [type(y).__name__, y.requires_grad, pending()]
    (y * y).sum().backward()
    return [kinds, x.grad]


@asks
def async_tensor_that_is_a_leaf():
    y = funcol.all_reduce(ones(4), "sum", dist.group.WORLD).requires_grad_()
    z = funcol.wait_tensor(y)
    (z * z).sum().backward()
    return [type(z).__name__, z is y.elem, y.grad]


@asks
def async_tensor_printed():
    return [repr(funcol.all_reduce(ones(2), "sum", dist.group.WORLD)), pending()]


# --- Dynamo ---------------------------------------------------------------------


def counted(fn, *calls, **kwargs):
    """What each call gives, and how often Dynamo compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, **kwargs)
    return [[compiled(*args) for args in calls], f"{counter.frame_count} graphs"]


@asks
def dynamo_async_tensor_wait():
    def fn(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD).wait() + 1

    return counted(fn, (ones(),), (ones(),), fullgraph=True)


@asks(backend="gloo")
def dynamo_work_wait():
    def fn(x):
        y = x * 2
        dist.all_reduce(y, async_op=True).wait()
        return y + 1

    return counted(fn, (ones(),), (ones(),))


@asks
def dynamo_synchronous_collective():
    def fn(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    return counted(fn, (ones(),), (ones(),), fullgraph=True)


@asks
def dynamo_issued_in_eager():
    def fn(y):
        return c10d.wait_tensor(y) + 1

    return counted(fn, (reduced(ones()),), (reduced(ones()),), fullgraph=True)


@asks
def dynamo_issued_in_eager_as_an_async_tensor():
    def fn(y):
        return y + 1

    calls = [(funcol.all_reduce(ones(), "sum", dist.group.WORLD),) for _ in range(2)]
    return counted(fn, *calls)


@asks
def dynamo_issued_in_eager_by_dist():
    def fn(y):
        return c10d.wait_tensor(y) + 1

    with funcol.allow_inflight_collective_as_graph_input_ctx():
        y = ones() * 2
        dist.all_reduce(y, async_op=True)
        return counted(fn, (y,), fullgraph=True)


@asks
def dynamo_issued_in_the_graph():
    y = torch.compile(lambda x: reduced(x * 2), backend="aot_eager", fullgraph=True)(ones())
    before = pending()
    return [before, c10d.wait_tensor(y), pending()]


@asks
def dynamo_graph_break_between():
    def fn(x):
        y = reduced(x * 2)
        torch._dynamo.graph_break()
        c10d.wait_tensor(y)
        return y + 1

    x = leaf()
    result = counted(fn, (x,), (ones(),))
    result[0][0].sum().backward()
    return [result, x.grad]


@asks
def dynamo_recompiles():
    def fn(y):
        return c10d.wait_tensor(y) * 2

    calls = [ones(3), ones(3), ones(4), ones(5), ones(4)[1:], leaf(4), ones(4, dtype=torch.float64)]
    return counted(fn, *[(x,) for x in calls])


@asks
def dynamo_wait_in_no_grad_and_inference():
    def fn(x):
        return waited(x) + 1

    x = leaf()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter)
    with torch.no_grad():
        a = compiled(x)
    with torch.inference_mode():
        b = compiled(x)
    return [a, b, compiled(x), counter.frame_count]


@asks_each(packet=c10d.wait_tensor, overload=WAIT, legacy=torch.ops.c10d_functional.wait_tensor, funcol=funcol.wait_tensor)
def dynamo_every_name_of_the_wait(wait):
    def fn(x):
        y = reduced(x * 2)
        return wait(y) + 1

    return counted(fn, (ones(),), fullgraph=True)


# --- tracers --------------------------------------------------------------------


class Module(torch.nn.Module):
    def forward(self, x):
        return waited(x) + 1


@asks
def jit_trace():
    # A group's name is no value that it knows.
    traced = torch.jit.trace(lambda x: c10d.wait_tensor(x * 2) + 1, ones())
    return [traced(3 * ones()), "wait_tensor" in str(traced.graph)]


@asks_each(strict=True, not_strict=False)
def export(strict):
    batch = torch.export.Dim("batch")
    program = torch.export.export(Module(), (ones(4),), dynamic_shapes=({0: batch},), strict=strict)
    decomposed = program.run_decompositions()
    return [[p.module()(ones(n)) for p in (program, decomposed) for n in (4, 5)], str(program.graph_signature.user_outputs)]


@asks
def symbolic_trace():
    gm = torch.fx.symbolic_trace(lambda x: c10d.wait_tensor(x) + 1)
    return [gm(ones()), [str(n.target) for n in gm.graph.nodes]]


# --- names and keywords ---------------------------------------------------------


@asks
def keyword_tensor():
    return c10d.wait_tensor(tensor=ones())


@asks
def keyword_self():
    return c10d.wait_tensor(self=ones())


@asks
def keyword_of_the_python_function():
    return funcol.wait_tensor(tensor=reduced(ones()))


@asks
def keyword_of_the_legacy_op():
    return torch.ops.c10d_functional.wait_tensor(self=reduced(ones()))


@asks
def not_a_tensor():
    return c10d.wait_tensor(3)


# What differs, as texts that stock's and the patched answer contain. On stock the wait's Python formula
# has no rule for torch.func, so that most transforms raise and jvp loses the tangent.
NO_RULE = "an autograd.Function with functorch transforms"
DIFFERENT = {
    # A wait is run again, so what the policy has computed twice is waited for.
    "selective_checkpoint_wait": ("1 pending", "[-5.229148864746094, -5.229148864746094, -5.229148864746094]', 3], '0 pending"),
    "selective_checkpoint_of_an_ignored_wait": ("[nan, nan, nan]", "[-5.229148864746094, -5.229148864746094, -5.229148864746094]', '0 pending"),
    **{
        f"{name}_{kind}": (NO_RULE, result)
        for kind in BOTH
        for name, result in {
            "func_grad": "[24.0, 24.0, 24.0]",
            "func_grad_twice": "[48.0, 48.0, 48.0]",
            "func_functionalized_grad": "[24.0, 24.0, 24.0]",
            "func_vjp": "[2.0, 2.0, 2.0]', ['Tensor torch.float32 [3] [1]: [2.0, 2.0, 2.0]",
            "func_jacrev": "[[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]]",
            "func_hessian": "[[48.0, 0.0, 0.0], [0.0, 48.0, 0.0], [0.0, 0.0, 48.0]]",
            "func_vmap_of_grad": "[[24.0, 24.0, 24.0], [24.0, 24.0, 24.0]]",
        }.items()
    },
    "func_grad_compiled_used": ("TorchRuntimeError", "[24.0, 24.0, 24.0]"),
    "func_grad_compiled_ignored": ("TorchRuntimeError", "[24.0, 24.0, 24.0]"),
    "func_jvp_used": ("[0.0, 0.0, 0.0]", "[2.0, 2.0, 2.0]', 'Tensor torch.float32 [3] [1]: [2.0, 2.0, 2.0]"),
    "make_fx_of_func_grad": (NO_RULE, "[24.0, 24.0, 24.0]"),
    # Eager returns its input, so its strides are what a meta kernel has to say.
    "fake_geometry_strided": ("[4, 3], [3, 1]", "[4, 3], [6, 2]"),
    "fake_geometry_offset": ("[3, 5], [5, 1]", "[3, 5], [6, 1]"),
    "fake_geometry_expanded": ("[4, 6], [6, 1]", "[4, 6], [0, 1]"),
    "meta_geometry_strided": ("[4, 3], [3, 1]", "[4, 3], [6, 2]"),
    "schema_check_mode": ("Argument tensor is not defined to alias output but was aliasing", "[2.0, 2.0, 2.0]"),
    "keyword_tensor": ("[1.0, 1.0, 1.0]", "RuntimeError: _c10d_functional::wait_tensor() is missing value for argument 'self'."),
    "keyword_self": ("missing value for argument 'tensor'", "[1.0, 1.0, 1.0]"),
    "not_a_tensor": ("for argument 'tensor'", "for argument 'self' but instead found type 'int'"),
}
# What stock refuses and patched refuses in the same words.
REFUSED = {
    "func_grad_of_a_collective",  # the collective's formula has no rule, either
    "func_grad_of_functionalized_used",  # nor has the functional wait's
    "func_grad_of_functionalized_ignored",
}


class TestSideBySide(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stock = ask_stock(__file__)

    @parametrize("name", ask)
    def test(self, name):
        stock, patched = self.stock[name], answer(ask[name])
        if name in DIFFERENT:
            before, now = DIFFERENT[name]
            self.assertIn(before, str(stock))
            self.assertIn(now, str(patched))
        else:
            self.assertEqual(patched, stock)
        # Two equal errors are no proof where a result is to be had.
        refused = isinstance(patched, str)
        self.assertEqual(refused, name in REFUSED or name in ("keyword_tensor", "not_a_tensor"), patched)


class TestPatched(TestCase):
    """What stock has not."""

    @parametrize("name", ["wait_tensor", "_wait_tensor_functional"])
    def test_gradcheck(self, name):
        op = getattr(c10d, name)
        x = torch.linspace(0.1, 1, 3, dtype=torch.float64, requires_grad=True)
        with one_rank("lazy"):
            for fn in (lambda x: op(x * 2), lambda x: op(reduced(x * 2))):
                self.assertTrue(torch.autograd.gradcheck(fn, x))
                self.assertTrue(torch.autograd.gradgradcheck(lambda x: fn(x).pow(3), x))

    @parametrize("device", ["meta", "fake"])
    def test_the_wait_returns_the_meta_tensor_itself(self, device):
        with FakeTensorMode() if device == "fake" else torch.device("meta"):
            x = torch.empty(4, 6)[1:, ::2]
            self.assertIs(c10d.wait_tensor(x), x)

    def test_the_old_keyword_names_the_new_one(self):
        with self.assertRaisesRegex(RuntimeError, "missing value for argument 'self'.*wait_tensor\\(Tensor\\(a!\\) self\\)"):
            c10d.wait_tensor(tensor=ones())


instantiate_parametrized_tests(TestSideBySide)
instantiate_parametrized_tests(TestPatched)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--answers"]:
        print_answers(ask)
    else:
        require_patched()
        run_tests()
