"""The programs that the patch is about, each with the result that is right.

``expected`` is written in terms of the inputs of all ranks, without a wait, so that
it holds whoever runs the program: one rank or several, eager or compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor


c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Program:
    """``fn(x, group_name)``, run on each rank.

    Where ``in_flight``, ``x`` is itself the output of an all-reduce that is pending;
    ``make_input`` issues it. Where ``grad``, ``x`` is a leaf that requires grad and the
    result is a scalar to go backward from, whose gradient is ``expected_grad``.
    """

    fn: Callable[[Tensor, str], Any]
    expected: Callable[[list[Tensor], int], Any]
    expected_grad: Callable[[list[Tensor], int], Tensor] | None = None
    in_flight: bool = False
    dynamic: bool = False

    @property
    def grad(self) -> bool:
        return self.expected_grad is not None

    def make_input(self, rank: int, group_name: str) -> Tensor:
        x = initial(rank)
        if self.in_flight:
            c10d.all_reduce_(x, "sum", group_name)
        return x.requires_grad_(self.grad)


def initial(rank: int) -> Tensor:
    return torch.arange(8.0) + 10 * rank


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def add_slice(t: Tensor) -> Tensor:
    t = t.clone()
    t[1:] += 1
    return t


# --- the programs, named as in the issue ------------------------------------


def all_reduce_then_add(x, group):
    return funcol.all_reduce(x, "sum", group) + 1


def wait_ignored(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    c10d.wait_tensor(y)
    return (y * 2).sum()


def wait_on_input(x, group):
    c10d.wait_tensor(x)
    return x * 2


def output_never_read(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    c10d.wait_tensor(y)
    return (x * 2).sum()


def view_before_wait(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    view = y[1:]
    c10d.wait_tensor(y)
    return (view * 2).sum()


def wait_on_slice(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    c10d.wait_tensor(y[1:])
    return (y * 2).sum()


def both_returned(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    w = c10d.wait_tensor(y)
    return y, w


def training(x, group):
    return (funcol.all_reduce(x * 3, "sum", group) ** 2).sum()


def wait_on_leaf(x, group):
    c10d.wait_tensor(x)
    return (x * x).sum()


def slice_waited_then_mutated(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    part = y[1:]
    c10d.wait_tensor(part)
    part.add_(1)
    return (y * y).sum()


def wait_on_slice_of_input(x, group):
    c10d.wait_tensor(x[1:])
    return (x * x).sum()


def coalesced(x, group):
    size = torch.distributed.get_world_size()
    summed = c10d.all_reduce_coalesced([x * 1, x * 2], "sum", group)
    gathered = c10d.all_gather_into_tensor_coalesced([x * 1, x * 2], size, group)
    scattered = c10d.reduce_scatter_tensor_coalesced(
        [x * 1, x * 2], "sum", size, group
    )
    outputs = [*summed, *gathered, *scattered]
    for y in outputs:
        c10d.wait_tensor(y)
    return [y + 1 for y in outputs]


def two_waits(x, group):
    y = c10d.all_reduce(x * 1, "sum", group)
    c10d.wait_tensor(y)
    c10d.wait_tensor(y[1:])
    return (y * 2).sum()


def _coalesced_expected(xs, rank):
    gathered, shard = torch.cat(xs), len(xs[0]) // len(xs)
    mine = total(xs)[rank * shard : (rank + 1) * shard]
    return [
        total(xs) + 1,
        2 * total(xs) + 1,
        gathered + 1,
        2 * gathered + 1,
        mine + 1,
        2 * mine + 1,
    ]


def _doubled_sum(xs, rank):
    return (2 * total(xs)).sum()


def _doubled_sum_grad(xs, rank):
    # Each rank's loss reaches x through the sum of all ranks' gradients.
    return torch.full_like(xs[rank], 2.0 * len(xs))


def _square_sum(xs, rank):
    return (total(xs) ** 2).sum()


def _square_sum_grad_of_input(xs, rank):
    return 2 * total(xs)


def _grad_but_first(xs, rank):
    grad = _doubled_sum_grad(xs, rank)
    grad[0] = 0
    return grad


PROGRAMS: dict[str, Program] = {
    "A": Program(all_reduce_then_add, lambda xs, rank: total(xs) + 1),
    "B": Program(wait_ignored, _doubled_sum, _doubled_sum_grad),
    "C": Program(wait_on_input, lambda xs, rank: 2 * total(xs), in_flight=True),
    "D": Program(
        output_never_read,
        lambda xs, rank: (2 * xs[rank]).sum(),
        lambda xs, rank: torch.full_like(xs[rank], 2.0),
    ),
    "E": Program(
        view_before_wait, lambda xs, rank: (2 * total(xs)[1:]).sum(), _grad_but_first
    ),
    "F": Program(wait_on_slice, _doubled_sum, _doubled_sum_grad),
    "G": Program(both_returned, lambda xs, rank: (total(xs), total(xs))),
    "H": Program(
        training,
        lambda xs, rank: (9 * total(xs) ** 2).sum(),
        lambda xs, rank: 18 * len(xs) * total(xs),
    ),
    "I": Program(wait_on_leaf, _square_sum, _square_sum_grad_of_input, in_flight=True),
    "J": Program(
        slice_waited_then_mutated,
        lambda xs, rank: (add_slice(total(xs)) ** 2).sum(),
        lambda xs, rank: 2 * len(xs) * add_slice(total(xs)),
    ),
    "K": Program(
        wait_on_slice_of_input, _square_sum, _square_sum_grad_of_input, in_flight=True
    ),
    "L": Program(coalesced, _coalesced_expected),
    "M": Program(wait_ignored, _doubled_sum, _doubled_sum_grad, dynamic=True),
    "N": Program(two_waits, _doubled_sum, _doubled_sum_grad),
}
