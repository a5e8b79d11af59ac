# Owner(s): ["oncall: distributed"]

"""The functional collectives on two real gloo ranks, eager and compiled."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


sys.path.insert(0, str(Path(__file__).parent))
from lazy_process_group import work_registry_size
from stock_torch import require_patched
from wait_tensor_programs import initial, PROGRAMS, total


c10d = torch.ops._c10d_functional
WORLD = 2


def eager(fn, dynamic=False):
    return fn


def compiled_by(backend, fn, dynamic):
    # The ranks are processes that live through all tests.
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)


def aot(fn, dynamic=False):
    """AOTAutograd and a compiler that keeps no input mutations in its graph."""
    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward))
    return compiled_by(backend, fn, dynamic)


def aot_eager(fn, dynamic=False):
    return compiled_by("aot_eager", fn, dynamic)


def inductor(fn, dynamic=False):
    return compiled_by("inductor", fn, dynamic)


WAYS = [eager, aot, aot_eager, inductor]


@dataclass(frozen=True)
class Collective:
    """``fn`` maps a rank's input to its output; ``expected`` gets all ranks' inputs.

    ``grad`` is what the sum of the output gives for each element of the input.
    ``asynchronous`` says whether eager mode defers the wait.
    """

    fn: Callable[[Tensor, Any], Any]
    expected: Callable[[list[Tensor], int], Any]
    grad: float | None = None
    asynchronous: bool = True


def shard(t: Tensor, rank: int) -> Tensor:
    return t.chunk(WORLD)[rank]


def permuted(xs: list[Tensor], rank: int) -> Tensor:
    return torch.cat([shard(x, rank) for x in xs])


COLLECTIVES = {
    "all_reduce": Collective(
        lambda x, g: funcol.all_reduce(x, "sum", g), lambda xs, r: total(xs), WORLD
    ),
    "all_reduce_avg": Collective(
        lambda x, g: funcol.all_reduce(x, "avg", g), lambda xs, r: total(xs) / WORLD
    ),
    "broadcast": Collective(lambda x, g: funcol.broadcast(x, 1, g), lambda xs, r: xs[1]),
    "all_gather_tensor": Collective(
        lambda x, g: funcol.all_gather_tensor(x, 0, g),
        lambda xs, r: torch.cat(xs),
        WORLD,
    ),
    "all_gather_tensor_dim1": Collective(
        lambda x, g: funcol.all_gather_tensor(x.view(2, -1), 1, g),
        lambda xs, r: torch.cat([x.view(2, -1) for x in xs], 1),
        WORLD,
        asynchronous=False,  # the result is put together from the gathered one
    ),
    "all_gather_tensor_autograd": Collective(
        lambda x, g: funcol.all_gather_tensor_autograd(x, 0, g),
        lambda xs, r: torch.cat(xs),
        WORLD,
    ),
    "reduce_scatter_tensor": Collective(
        lambda x, g: funcol.reduce_scatter_tensor(x, "sum", 0, g),
        lambda xs, r: shard(total(xs), r),
        1,
    ),
    "reduce_scatter_tensor_autograd": Collective(
        lambda x, g: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, g),
        lambda xs, r: shard(total(xs), r),
        1,
    ),
    "all_to_all_single": Collective(
        lambda x, g: funcol.all_to_all_single(x, None, None, g), permuted, 1
    ),
    "all_to_all_single_autograd": Collective(
        lambda x, g: funcol.all_to_all_single_autograd(x, [4, 4], [4, 4], g),
        permuted,
        1,
    ),
    "permute_tensor": Collective(
        lambda x, g: funcol.permute_tensor(x, [1, 0], g), lambda xs, r: xs[1 - r]
    ),
    "all_reduce_coalesced": Collective(
        lambda x, g: funcol.all_reduce_coalesced([x, 2 * x], "sum", g),
        lambda xs, r: [total(xs), 2 * total(xs)],
        3 * WORLD,
    ),
    "all_gather_into_tensor_coalesced": Collective(
        lambda x, g: funcol.all_gather_into_tensor_coalesced([x, 2 * x], g),
        lambda xs, r: [torch.cat(xs), 2 * torch.cat(xs)],
        3 * WORLD,
    ),
    "reduce_scatter_tensor_coalesced": Collective(
        lambda x, g: funcol.reduce_scatter_tensor_coalesced(
            [x, 2 * x], "sum", [0, 0], g
        ),
        lambda xs, r: [shard(total(xs), r), 2 * shard(total(xs), r)],
        3,
    ),
}


class TestTwoRanks(MultiProcContinuousTest):
    world_size = WORLD
    timeout = timedelta(seconds=120)

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @property
    def group(self):
        return dist.group.WORLD

    def assertAllWaited(self):
        self.assertEqual(work_registry_size(), 0)

    @parametrize("name", PROGRAMS)
    @parametrize("way", WAYS, name_fn=lambda way: way.__name__)
    def test_program(self, name, way):
        program, rank = PROGRAMS[name], self.rank
        xs = [initial(r) for r in range(WORLD)]
        x = program.make_input(rank, self.group.group_name)
        result = way(program.fn, program.dynamic)(x, self.group.group_name)
        self.assertEqual(result, program.expected(xs, rank))
        if program.grad:
            result.backward()
            self.assertEqual(x.grad, program.expected_grad(xs, rank))
        own = total(xs) if program.in_flight else xs[rank]
        self.assertEqual(x.detach(), own)
        self.assertAllWaited()

    @parametrize("name", COLLECTIVES)
    @parametrize("way", WAYS, name_fn=lambda way: way.__name__)
    def test_collective(self, name, way):
        collective, rank = COLLECTIVES[name], self.rank
        xs = [initial(r) for r in range(WORLD)]
        result = way(lambda x: collective.fn(x, self.group))(xs[rank].clone())
        outputs = result if isinstance(result, list) else [result]
        is_async = way is eager and collective.asynchronous
        for y in outputs:
            self.assertIs(type(y), funcol.AsyncCollectiveTensor if is_async else Tensor)
        expected = collective.expected(xs, rank)
        self.assertEqual(torch.utils._pytree.tree_map(lambda y: y + 0, result), expected)
        self.assertAllWaited()

    @parametrize("name", [n for n, c in COLLECTIVES.items() if c.grad is not None])
    @parametrize("way", WAYS, name_fn=lambda way: way.__name__)
    def test_gradient(self, name, way):
        collective = COLLECTIVES[name]

        def fn(x):
            result = collective.fn(x, self.group)
            outputs = result if isinstance(result, list) else [result]
            return sum(y.sum() for y in outputs)

        x = initial(self.rank).requires_grad_()
        way(fn)(x).backward()
        self.assertEqual(x.grad, torch.full_like(x, collective.grad))
        self.assertAllWaited()

    def test_an_async_tensor_is_waited_on_at_its_first_use(self):
        y = funcol.all_reduce(initial(self.rank), "sum", self.group)
        self.assertEqual(work_registry_size(), 1)
        view = y.view(2, 4)  # views do not read
        self.assertIs(type(view), funcol.AsyncCollectiveTensor)
        self.assertEqual(work_registry_size(), 1)
        self.assertEqual(
            view + 1, total([initial(r) for r in range(WORLD)]).view(2, 4) + 1
        )
        self.assertAllWaited()

    def test_wait_returns_the_tensor_itself(self):
        y = funcol.all_reduce(initial(self.rank), "sum", self.group)
        waited = y.wait()
        self.assertIs(type(waited), Tensor)
        self.assertIs(waited, y.elem)
        self.assertIs(funcol.wait_tensor(waited), waited)
        self.assertAllWaited()

    @parametrize("way", [aot, aot_eager, inductor], name_fn=lambda way: way.__name__)
    def test_issued_in_eager_and_waited_on_in_the_graph(self, way):
        def wait_then_square(y):
            torch.ops.c10d_functional.wait_tensor(y)
            return y * y

        xs = [initial(r) for r in range(WORLD)]
        y = xs[self.rank].clone()
        with funcol.allow_inflight_collective_as_graph_input_ctx():
            dist.all_reduce(y, async_op=True)
            self.assertEqual(work_registry_size(), 1)
            result = way(wait_then_square)(y)
        self.assertEqual(result, total(xs) ** 2)
        self.assertAllWaited()

    @parametrize("way", [aot, aot_eager, inductor], name_fn=lambda way: way.__name__)
    def test_training_is_eager_training(self, way):
        # Gradients averaged over the ranks by hand, as DDP does.
        def train(step):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
            )
            parameters = list(model.parameters())

            def loss(x, *parameters):
                y = torch.func.functional_call(
                    model, dict(zip(dict(model.named_parameters()), parameters)), x
                )
                y = funcol.all_reduce(y, "sum", self.group)
                return (y**2).mean()

            for i in range(3):
                x = torch.sin(torch.arange(32.0).view(4, 8) + i + self.rank)
                grads = torch.autograd.grad(step(loss)(x, *parameters), parameters)
                with torch.no_grad():
                    for p, grad in zip(parameters, grads):
                        p -= 0.1 * (funcol.all_reduce(grad, "sum", self.group) / WORLD)
            return [p.detach() for p in parameters]

        for ours, theirs in zip(train(way), train(eager)):
            self.assertEqual(ours, theirs, atol=1e-6, rtol=1e-6)
        self.assertAllWaited()


instantiate_parametrized_tests(TestTwoRanks)

if __name__ == "__main__":
    require_patched()
    run_tests()
