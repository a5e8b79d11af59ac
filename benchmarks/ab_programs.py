"""The distributed programs that ab_codegen.py compiles in stock and in patched torch.

Each function here takes an :class:`Env` and returns a step: a function without
arguments that does one forward (and, where the program trains, one backward and one
update) and returns the tensors that must be the same in both torches. Nothing here
knows which torch runs it, whether the process group is fake, or what the compiler is
configured to do; so a difference that is seen comes from the patch.

Sizes are small, and divisible by every world size used, so that what is compared is
structure: the order of kernels, collectives and waits.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn, Tensor


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test" / "distributed"))
import wait_tensor_programs


c10d = torch.ops._c10d_functional
Step = Callable[[], Any]


@dataclass(frozen=True)
class Env:
    """Where a step runs. ``compile`` and ``checkpoint`` hide how it is compiled."""

    rank: int
    world: int
    group: str
    compile: Callable[[Callable], Callable]
    checkpoint: Callable[..., Any]
    backward: Callable[[], contextlib.AbstractContextManager]

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None):
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", shape or (self.world,), mesh_dim_names=names)


@dataclass(frozen=True)
class Program:
    make: Callable[[Env], Step]
    trains: bool
    # What stock must be told to mean the same; otherwise both run the same program.
    on_stock: Callable[[Env], Step] | None = None
    # Why it runs in one mode only, if so.
    fake_only: str | None = None
    gloo_only: str | None = None
    # Above it, sizes that grow with the world make a trace take minutes.
    max_world: int = 1 << 20


PROGRAMS: dict[str, Program] = {}


def program(trains: bool = False, **kwargs):
    def register(make: Callable[[Env], Step]) -> Callable[[Env], Step]:
        PROGRAMS[make.__name__] = Program(make, trains, **kwargs)
        return make

    return register


def train(env: Env, params: list[Tensor], loss: Callable[[], Tensor], lr: float = 0.1) -> Step:
    """A step that goes backward from ``loss()`` and updates ``params``, in plain eager SGD."""

    def step():
        value = loss()
        with env.backward():
            value.backward()
        grads = [p.grad for p in params]
        with torch.no_grad():
            for p, g in zip(params, grads):
                if g is not None:
                    p.sub_(g, alpha=lr)
                p.grad = None
        return [value.detach(), *(g for g in grads if g is not None), *(p.detach() for p in params)]

    return step


def rand(*size: int, seed: int = 0, **kwargs) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(**kwargs) / 4


def param(*size: int, seed: int = 0, **kwargs) -> Tensor:
    return rand(*size, seed=seed, **kwargs).requires_grad_()


# --- what the patch is about: each program of the tests, under its own name -----------


def _wait_on_slice(x, group):
    y = c10d.wait_tensor(c10d.all_reduce(x * 1, "sum", group))
    return (y * 2).sum()


def _view_before_wait(x, group):
    y = c10d.wait_tensor(c10d.all_reduce(x * 1, "sum", group))
    return (y[1:] * 2).sum()


def _slice_waited_then_mutated(x, group):
    y = c10d.wait_tensor(c10d.all_reduce(x * 1, "sum", group))
    y[1:].add_(1)
    return (y * y).sum()


def _coalesced(x, group):
    size = dist.get_world_size()
    summed = c10d.all_reduce_coalesced([x * 1, x * 2], "sum", group)
    gathered = c10d.all_gather_into_tensor_coalesced([x * 1, x * 2], size, group)
    scattered = c10d.reduce_scatter_tensor_coalesced([x * 1, x * 2], "sum", size, group)
    return [y + 1 for y in [c10d.wait_tensor(y) for y in (*summed, *gathered, *scattered)]]


def _two_waits(x, group):
    y = c10d.wait_tensor(c10d.wait_tensor(c10d.all_reduce(x * 1, "sum", group)))
    return (y * 2).sum()


# Where a test's program ignores a wait's result, stock has no dependency from the wait
# to the reads: its graph is the bug, and a race. There stock is given the program that
# uses the result, and that is what the patched torch must make of the one that does not.
# Not so for an input that requires grad: there stock lets the backward write gradients
# over the waited result, which is the caller's tensor, so its code is no model.
ON_STOCK: dict[str, Callable] = {
    "wait_ignored": _wait_on_slice,
    "wait_on_input": lambda x, group: c10d.wait_tensor(x) * 2,
    "view_before_wait": _view_before_wait,
    "wait_on_slice": _wait_on_slice,
    "slice_waited_then_mutated": _slice_waited_then_mutated,
    "coalesced": _coalesced,
    "two_waits": _two_waits,
}


def _from_tests(letter: str) -> None:
    source = wait_tensor_programs.PROGRAMS[letter]
    name = source.fn.__name__

    def make(env: Env, fn: Callable = source.fn) -> Step:
        compiled = env.compile(fn)

        def step():
            x = source.make_input(env.rank, env.group)
            result = compiled(x, env.group)
            if source.grad:
                with env.backward():
                    result.backward()
                return result.detach(), x.grad
            return result

        return step

    make.__name__ = name
    on_stock = functools.partial(make, fn=ON_STOCK[name]) if name in ON_STOCK else None
    program(trains=source.grad, on_stock=on_stock)(make)


for _letter in wait_tensor_programs.PROGRAMS:
    if not wait_tensor_programs.PROGRAMS[_letter].dynamic:
        _from_tests(_letter)


# --- collectives by hand ---------------------------------------------------------------


@program()
def all_reduce_chain(env):
    def fn(x):
        for _ in range(4):
            x = funcol.all_reduce(x * 2, "sum", env.group) + 1
        return x

    compiled = env.compile(fn)
    return lambda: compiled(rand(16, seed=env.rank))


@program()
def all_reduces_independent(env):
    def fn(xs, w):
        ys = [funcol.all_reduce(x @ w, "sum", env.group) for x in xs]
        z = w @ w
        return [y + z for y in ys]

    compiled = env.compile(fn)
    return lambda: compiled([rand(8, 8, seed=env.rank + i) for i in range(4)], rand(8, 8))


@program()
def broadcast(env):
    def fn(x):
        return funcol.broadcast(x * 2, 0, env.group).relu() + funcol.broadcast(x, 0, env.group)

    compiled = env.compile(fn)
    return lambda: compiled(rand(16, seed=env.rank))


@program()
def in_place_after_wait(env):
    def fn(x):
        y = funcol.all_reduce(x * 2, "sum", env.group)
        y.add_(1)
        z = y.view(-1)[1:]
        z.mul_(2)
        return y

    compiled = env.compile(fn)
    return lambda: compiled(rand(4, 4, seed=env.rank))


@program()
def all_reduce_in_place(env):
    def fn(x):
        dist.all_reduce(x)  # Dynamo makes it a functional one, and copies back
        return x * 2

    compiled = env.compile(fn)

    def step():
        x = rand(16, seed=env.rank)
        return compiled(x), x

    return step


@program()
def input_in_flight_and_updated(env):
    def fn(x, y):
        c10d.wait_tensor(x)
        x.add_(y)
        return x * 2

    compiled = env.compile(fn)

    def step():
        x = rand(16, seed=env.rank)
        c10d.all_reduce_(x, "sum", env.group)
        return compiled(x, rand(16, seed=1)), x

    return step


@program()
def several_groups(env):
    # Every rank makes every group, also one that it is not in.
    dist.new_group(list(range(max(1, env.world // 2))))
    other = dist.new_group(list(range(env.world)))

    def fn(x):
        a = funcol.all_reduce(x * 2, "sum", env.group)
        b = funcol.all_reduce(x * 3, "avg" if dist.get_backend() == "fake" else "sum", other.group_name)
        c = funcol.all_gather_tensor(x * 4, 0, other.group_name)
        return a + b, c.relu()

    compiled = env.compile(fn)
    return lambda: compiled(rand(16, seed=env.rank))


@program()
def dtypes(env):
    def fn(b, c, i):
        return (
            funcol.all_reduce(b * 2, "sum", env.group) + 1,
            funcol.all_reduce(c * 2, "sum", env.group).real + 1,
            funcol.all_gather_tensor(i + 1, 0, env.group) * 2,
        )

    compiled = env.compile(fn)
    return lambda: compiled(
        rand(16, seed=env.rank, dtype=torch.bfloat16),
        torch.complex(rand(8, seed=1), rand(8, seed=2)),
        torch.arange(8) + env.rank,
    )


@program()
def coalesced_collectives(env):
    def fn(a, b, big):
        r = funcol.all_reduce_coalesced([a * 2, b * 2], "sum", env.group)
        g = funcol.all_gather_into_tensor_coalesced([a + 1, b + 1], env.group)
        s = funcol.reduce_scatter_tensor_coalesced([big * 2, big * 3], "sum", [0, 0], env.group)
        return [t + 1 for t in (*r, *g, *s)]

    compiled = env.compile(fn)
    return lambda: compiled(rand(4, 4, seed=env.rank), rand(8, seed=env.rank), rand(2 * env.world, 3, seed=env.rank))


@program()
def gather_overlaps_matmul(env):
    def fn(x, w, v):
        a = c10d.all_gather_into_tensor(x, env.world, env.group)
        y = v @ v
        b = c10d.all_gather_into_tensor(w, env.world, env.group)
        z = y @ v
        return c10d.wait_tensor(a) @ z, c10d.wait_tensor(b) @ y

    compiled = env.compile(fn)
    return lambda: compiled(rand(4, 16, seed=env.rank), rand(2, 16, seed=env.rank), rand(16, 16))


@program()
def summed_reduce_scatters(env):
    """The pattern that dedup_reduce_scatters fuses."""

    def fn(a, b, c):
        rs = [funcol.reduce_scatter_tensor(t, "sum", 0, env.group) for t in (a.sin(), b.cos(), c.exp())]
        return rs[0] + rs[1] + rs[2]

    compiled = env.compile(fn)
    return lambda: compiled(*(rand(2 * env.world, 4, seed=env.rank + i) for i in range(3)))


@program()
def gram_matrices(env):
    """Newton-Schulz on a gathered X: allow_comms_decompositions makes each X.T @ X local."""

    def fn(x):
        x = funcol.all_gather_tensor(x, 0, env.group)
        for _ in range(3):
            x = x * 1.5 - x @ (x.t() @ x)
        return x.split(2)[env.rank]

    compiled = env.compile(fn)
    return lambda: compiled(rand(2, 4, seed=env.rank))


@program(max_world=64)
def data_dependent_all_to_all(env):
    def fn(x, counts):
        out = funcol.all_to_all_single(counts, None, None, env.group)
        sizes = out.tolist()
        for s in sizes:
            torch._check(s >= 0)
        y = funcol.all_to_all_single(x * 2, sizes, [1] * env.world, env.group)
        return y + 1

    compiled = env.compile(fn)

    def step():
        return compiled(rand(env.world, 4, seed=env.rank), torch.ones(env.world, dtype=torch.int64))

    return step


@program()
def wait_in_cond(env):
    def fn(x, flag):
        def yes(x):
            return funcol.all_reduce(x * 2, "sum", env.group) + 1

        def no(x):
            return x - 1

        return torch.cond(flag, yes, no, (x,))

    compiled = env.compile(fn)
    return lambda: compiled(rand(16, seed=env.rank), torch.tensor(True))


@program(trains=True)
def nested_region(env):
    """invoke_subgraph: one body with a collective, called several times."""

    @torch.compiler.nested_compile_region
    def block(x, w):
        return funcol.all_reduce((x @ w).relu(), "sum", env.group).tanh()

    w = param(8, 8)

    def fn(x):
        for _ in range(3):
            x = block(x, w)
        return x.sum()

    compiled = env.compile(fn)
    return train(env, [w], lambda: compiled(rand(4, 8, seed=env.rank)))


# --- data parallel ---------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, layers: int = 2):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                *(m for _ in range(layers) for m in (nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)))
            )

    def forward(self, x):
        return self.net(x)


@program(trains=True)
def data_parallel_step_in_graph(env):
    """Forward, backward, gradient all-reduce, clipping and SGD in one graph."""
    model = MLP(8, 16)
    params = dict(model.named_parameters())

    def fn(x):
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        grads = [funcol.all_reduce(g, "sum", env.group) / env.world for g in grads]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        with torch.no_grad():
            for p, g in zip(params.values(), grads):
                p.sub_(g * scale, alpha=0.1)
        return loss.detach(), norm

    compiled = env.compile(fn, fullgraph=False)
    return lambda: [*compiled(rand(4, 8, seed=env.rank)), *(p.detach() for p in params.values())]


@program(trains=True)
def gradient_clipping(env):
    """The norm over shards of all ranks, by a collective; then clip, in place."""
    params = [rand(8, 8, seed=i) for i in range(3)]

    def fn(params, grads):
        total = funcol.all_reduce(torch.stack([g.square().sum() for g in grads]).sum(), "sum", env.group)
        scale = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for p, g in zip(params, grads):
            g.mul_(scale)
            p.sub_(g)
        return total

    compiled = env.compile(fn)

    def step():
        grads = [rand(8, 8, seed=10 * env.rank + i) for i in range(3)]
        return [compiled(params, grads), *params, *grads]

    return step


def _ddp(env: Env) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    # DDP's constructor turns the fusion on for the whole process, and says that it is
    # the only one that may. Here the configuration decides.
    with torch._inductor.config.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25):
        model = DistributedDataParallel(MLP(8, 16), bucket_cap_mb=1)
    compiled = env.compile(model, fullgraph=False)
    x = rand(4, 8, seed=env.rank)
    return train(env, list(model.parameters()), lambda: compiled(x).square().mean())


@program(trains=True)
def ddp_python_reducer(env):
    """DDP whose gradient all-reduces are functional collectives in hooks.

    With the variant compiled_autograd they, and their waits, are in the graph.
    """
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        step = _ddp(env)

    def patched():
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            return step()

    return patched


@program(trains=True, gloo_only="DDP's C++ reducer needs what a real collective's future holds")
def ddp_optimizer(env):
    """DDP as it comes: Dynamo splits the graph, the reducer is C++."""
    return _ddp(env)


@program(trains=True)
def fsdp2_fully_shard(env):
    """FSDP2 with compiled blocks. Its own collectives stay eager in this release.

    2.13 no longer traces FSDP2's hooks (Dynamo's skip_fsdp_hooks is gone): collectives
    of FSDP2 are never in a graph, and simple_fsdp below stands for sharding in the graph.
    """
    from torch.distributed.fsdp import fully_shard

    model = MLP(8, 16)
    mesh = env.mesh()
    for layer in model.net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compiled = env.compile(model, fullgraph=False)
    x = rand(4, 8, seed=env.rank)
    return train(env, list(model.parameters()), lambda: compiled(x).square().mean())


def _simple_fsdp(env: Env, mesh, shards: list, replicas: list) -> Step:
    """Parameters are DTensors; the forward redistributes them, so autograd does the rest."""
    from torch.distributed.tensor import distribute_tensor, Partial

    sizes = [(env.world * 2, 8), (8, env.world * 2)] * 2
    params = [distribute_tensor(rand(*size, seed=i), mesh, shards).requires_grad_() for i, size in enumerate(sizes)]
    grads = [Partial("avg" if dist.get_backend() == "fake" else "sum") if r.is_replicate() else r for r in replicas]

    def block(x, up, down):
        up, down = (p.redistribute(placements=replicas).to_local(grad_placements=grads) for p in (up, down))
        return x + F.linear(F.gelu(F.linear(x, up)), down)

    def fn(x):
        for up, down in zip(params[::2], params[1::2]):
            x = env.checkpoint(block, x, up, down)
        return x.square().mean()

    compiled = env.compile(fn)
    x = rand(4, 8, seed=env.rank)
    return train(env, params, lambda: compiled(x))


@program(trains=True)
def simple_fsdp(env):
    from torch.distributed.tensor import Replicate, Shard

    return _simple_fsdp(env, env.mesh(), [Shard(0)], [Replicate()])


@program(trains=True)
def simple_ddp(env):
    from torch.distributed.tensor import Replicate

    return _simple_fsdp(env, env.mesh(), [Replicate()], [Replicate()])


@program(trains=True)
def simple_hsdp(env):
    from torch.distributed.tensor import Replicate, Shard

    mesh = env.mesh(2, env.world // 2, names=("replicate", "shard"))
    return _simple_fsdp(env, mesh, [Replicate(), Shard(0)], [Replicate(), Replicate()])


@program(trains=True)
def fsdp_by_hand(env):
    """FSDP with the autograd collectives, in mixed precision: many small gathers to bucket."""
    shards = [param(2, 8, seed=i) for i in range(4)]

    def layer(x, shard):
        w = funcol.all_gather_tensor_autograd(shard.to(torch.bfloat16), 0, env.group)
        return x + (x @ w.t()).relu() @ w

    def fn(x):
        for shard in shards:
            x = env.checkpoint(layer, x, shard)
        return x.float().square().mean()

    compiled = env.compile(fn)
    x = rand(4, 8, seed=env.rank, dtype=torch.bfloat16)
    return train(env, shards, lambda: compiled(x))


# --- tensor, sequence and context parallel ---------------------------------------------


@program(trains=True)
def tp_mlp(env):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel

    model = MLP(8, env.world * 2)
    plan = {f"net.{i}": ColwiseParallel() if i % 3 == 0 else RowwiseParallel() for i in (0, 2, 3, 5)}
    model = parallelize_module(model, env.mesh(), plan)
    compiled = env.compile(lambda x: model(x).square().mean())
    x = rand(4, 8)
    return train(env, list(model.parameters()), lambda: compiled(x))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, head: int):
        super().__init__()
        self.head = head
        self.q, self.k, self.v = (nn.Linear(dim, heads * head, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head, dim, bias=False)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, head: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, head)
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


@program(trains=True)
def tp_attention(env):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel

    model = seeded(lambda: Attention(8, env.world, 2))
    plan = {**{name: ColwiseParallel() for name in "qkv"}, "o": RowwiseParallel()}
    model = parallelize_module(model, env.mesh(), plan)
    compiled = env.compile(lambda x: model(x).square().mean())
    x = rand(2, 4, 8)
    return train(env, list(model.parameters()), lambda: compiled(x))


@program(trains=True, max_world=64)
def transformer_tp_sp(env):
    """Two layers, tensor and sequence parallel, checkpointed where the variant says so."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        parallelize_module,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    model = seeded(lambda: nn.Sequential(*(Block(8, env.world, 2, env.world * 2) for _ in range(2))))
    mesh = env.mesh()
    for block in model:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.o": RowwiseParallel(output_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
            "1": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        },
    )

    def fn(x):
        for block in model:
            x = env.checkpoint(block, x)
        return x.square().mean()

    compiled = env.compile(fn)
    x = rand(1, env.world * 2, 8)
    return train(env, list(model.parameters()), lambda: compiled(x))


@program(trains=True)
def transformer_data_parallel(env):
    """Two layers; gradients of DTensor parameters are reduced in the backward graph."""
    from torch.distributed.tensor import distribute_tensor, Partial, Replicate

    model = seeded(lambda: nn.Sequential(*(Block(8, 2, 4, 16) for _ in range(2))))
    mesh = env.mesh()
    params = {
        name: distribute_tensor(p.detach(), mesh, [Replicate()]).requires_grad_()
        for name, p in model.named_parameters()
    }

    def fn(x):
        local = {name: p.to_local(grad_placements=[Partial()]) for name, p in params.items()}
        return torch.func.functional_call(model, local, (x,)).square().mean()

    compiled = env.compile(fn)
    x = rand(2, 4, 8, seed=env.rank)
    return train(env, list(params.values()), lambda: compiled(x))


@program(trains=True)
def async_tp(env):
    """all_gather -> matmul, matmul -> reduce_scatter: what _micro_pipeline_tp fuses."""
    up, down = param(16, 32, seed=1), param(32, 16, seed=2)

    def block(x):
        x = funcol.all_gather_tensor_autograd(x, 0, env.group)
        return funcol.reduce_scatter_tensor_autograd((x @ up).relu() @ down, "sum", 0, env.group)

    def fn(x):
        return env.checkpoint(block, env.checkpoint(block, x)).square().mean()

    compiled = env.compile(fn)
    x = rand(8, 16, seed=env.rank)
    return train(env, [up, down], lambda: compiled(x))


@program()
def async_tp_inference(env):
    def fn(x, up, down):
        y = funcol.all_gather_tensor(x, 0, env.group)
        z = [y @ up, y @ up.cos()]
        return funcol.reduce_scatter_tensor(
            z[0].relu() @ down, "avg" if dist.get_backend() == "fake" else "sum", 0, env.group
        ), z[1]

    compiled = env.compile(fn)
    return lambda: compiled(rand(8, 16, seed=env.rank), rand(16, 32, seed=1), rand(32, 16, seed=2))


@program()
def async_tp_last_dim(env):
    """Gather and scatter along other dimensions, where the pattern has a split and a cat."""

    def fn(x, up, down):
        y = funcol.all_gather_tensor(x, 1, env.group) @ up
        return funcol.reduce_scatter_tensor(y @ down, "sum", 1, env.group)

    compiled = env.compile(fn)
    return lambda: compiled(rand(2, 4, 16, seed=env.rank), rand(16, 32, seed=1), rand(32, 16, seed=2))


@program(trains=True)
def moe_all_to_all(env):
    """Tokens go to the experts' ranks and come back."""
    expert = param(8, 8, seed=1)
    router = param(8, 8, seed=2)

    def layer(x):
        x = x * torch.sigmoid(x @ router)
        there = funcol.all_to_all_single_autograd(x, None, None, env.group)
        return x + funcol.all_to_all_single_autograd((there @ expert).relu(), None, None, env.group)

    def fn(x):
        return env.checkpoint(layer, env.checkpoint(layer, x)).square().mean()

    compiled = env.compile(fn)
    x = rand(2 * env.world, 8, seed=env.rank)
    return train(env, [expert, router], lambda: compiled(x))


@program(trains=True)
def ulysses_attention(env):
    """Context parallel by all_to_all: from sequence shards to head shards, and back."""
    qkv = param(8, 3 * 2 * env.world, seed=1)
    rows = 4

    def fn(x):
        y = (x @ qkv).view(rows, env.world, 6).transpose(0, 1).contiguous()
        y = funcol.all_to_all_single_autograd(y, None, None, env.group).flatten(0, 1)
        q, k, v = (t[None, None] for t in y.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)[0, 0]
        y = funcol.all_to_all_single_autograd(y.contiguous(), None, None, env.group)
        return y.square().mean()

    compiled = env.compile(fn)
    x = rand(rows, 8, seed=env.rank)
    return train(env, [qkv], lambda: compiled(x))


@program()
def ring_attention(env):
    """Keys and values go round; each hop's permute overlaps the previous hop's attention."""
    hops = min(env.world, 4)

    def fn(q, k, v):
        to_next = [(r + 1) % env.world for r in range(env.world)]
        total, norm = torch.zeros_like(q), torch.zeros_like(q[..., :1])
        for hop in range(hops):
            if hop + 1 < hops:
                k1 = funcol.permute_tensor(k.flatten(), to_next, dist.group.WORLD).view_as(k)
                v1 = funcol.permute_tensor(v.flatten(), to_next, dist.group.WORLD).view_as(v)
            scores = (q @ k.transpose(-1, -2)).exp()
            total, norm = total + scores @ v, norm + scores.sum(-1, keepdim=True)
            if hop + 1 < hops:
                k, v = k1, v1
        return total / norm

    compiled = env.compile(fn)
    return lambda: compiled(*(rand(2, 4, 8, seed=3 * env.rank + i) for i in range(3)))


@program(trains=True)
def context_parallel_gather(env):
    """Context parallel as all_gather of keys and values; reduce_scatter in the backward."""
    qkv = param(8, 24, seed=1)

    def fn(x):
        q, k, v = (x @ qkv).chunk(3, -1)
        k = funcol.all_gather_tensor_autograd(k.contiguous(), 0, env.group)
        v = funcol.all_gather_tensor_autograd(v.contiguous(), 0, env.group)
        return F.scaled_dot_product_attention(q[None], k[None], v[None]).square().mean()

    compiled = env.compile(fn)
    x = rand(4, 8, seed=env.rank)
    return train(env, [qkv], lambda: compiled(x))


# --- pipeline, loss ----------------------------------------------------------------------


@program()
def pipeline_p2p(env):
    """One hop of a pipeline: send this stage's output, receive the neighbour's."""
    peer = env.rank ^ 1

    def fn(x, w):
        y = (x @ w).relu()
        ops = ["isend", "irecv"] if env.rank % 2 == 0 else ["irecv", "isend"]
        buffer = torch.empty_like(y)
        tensors = [y, buffer] if env.rank % 2 == 0 else [buffer, y]
        outputs = c10d.batch_p2p_ops(ops, [peer, peer], [0, 0], tensors, env.group)
        outputs = [c10d.wait_tensor(t) for t in outputs]
        return outputs[ops.index("irecv")] @ w

    compiled = env.compile(fn)
    return lambda: compiled(rand(4, 8, seed=env.rank), rand(8, 8))


@program()
def pipeline_isend_irecv(env):
    peer = env.rank ^ 1

    def fn(x, w):
        y = (x @ w).relu()
        sent = c10d.isend(y, peer, 0, env.group)
        got = c10d.wait_tensor(c10d.irecv(torch.empty_like(y), peer, 0, env.group))
        z = got @ w
        c10d.wait_tensor(sent)
        return z

    compiled = env.compile(fn)
    return lambda: compiled(rand(4, 8, seed=env.rank), rand(8, 8))


@program(trains=True)
def loss_parallel(env):
    """Cross entropy over logits that are sharded by vocabulary."""
    from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel as parallel

    mesh = env.mesh()
    w = distribute_tensor(rand(8, 2 * env.world, seed=1), mesh, [Shard(1)]).requires_grad_()
    target = torch.arange(4) % (2 * env.world)

    def fn(x):
        x = DTensor.from_local(x, mesh, [Replicate()])
        return F.cross_entropy(x @ w, DTensor.from_local(target, mesh, [Replicate()])).to_local()

    compiled = env.compile(fn, fullgraph=False)
    x = rand(4, 8)

    def step():
        with parallel():
            return inner()

    inner = train(env, [w], lambda: compiled(x))
    return step


@program(trains=True)
def vocab_parallel_by_hand(env):
    """Megatron's embedding and cross entropy: masked lookups, max and sum across ranks."""
    table = param(4, 8, seed=env.rank)
    tokens = torch.arange(6) % (4 * env.world)

    def fn(tokens):
        local = tokens - 4 * env.rank
        mask = (local < 0) | (local >= 4)
        x = F.embedding(local.clamp(0, 3), table).masked_fill(mask[:, None], 0.0)
        x = funcol.all_reduce(x, "sum", env.group)
        logits = x @ table.t()
        top = funcol.all_reduce(logits.detach().amax(-1), "max", env.group)
        total = funcol.all_reduce((logits - top[:, None]).exp().sum(-1), "sum", env.group)
        return (total.log() + top - logits[:, 0]).mean()

    compiled = env.compile(fn)
    return train(env, [table], lambda: compiled(tokens))
