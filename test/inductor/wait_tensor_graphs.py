"""Runs the reinplace pass on a graph, and sees all that a caller of a graph can tell."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.virtualized import V


__all__ = ["copied", "difference", "observe", "Observed", "reinplace"]

# Values of the outputs and the inputs; which of them share memory; which of those may.
Observed = tuple[list[torch.Tensor], set[tuple[int, int]], set[tuple[int, int]]]


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph and its bodies once more, with the same fake tensors: a deep copy has others."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    copy = fx.GraphModule(gm, graph)
    for name, body in gm.named_children():
        if isinstance(body, fx.GraphModule):
            setattr(copy, name, copied(body))
    return copy


def reinplace(gm: fx.GraphModule, fake_mode: Any) -> fx.GraphModule:
    """Runs the pass on ``gm`` itself, under the mode of its fake tensors."""
    with V.set_fake_mode(fake_mode):
        reinplace_inplaceable_ops(FakeTensorUpdater(gm), gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def observe(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    flying: Sequence[bool],
    mutated: Sequence[bool],
    group: str,
) -> Observed:
    """All that a caller of ``fn`` can tell.

    ``flying`` says which inputs are in flight when ``fn`` is called, ``mutated`` which
    it is reported to mutate: an output may share memory with those.
    """
    for x, is_flying in zip(inputs, flying, strict=True):
        if is_flying:
            torch.ops._c10d_functional.all_reduce_(x, "sum", group)
    results = fn(*inputs)
    outputs = results if isinstance(results, (list, tuple)) else (results,)
    outputs = [t for t in outputs if isinstance(t, torch.Tensor)]
    memory = [t.untyped_storage().data_ptr() for t in (*inputs, *outputs)]
    pairs = itertools.combinations(range(len(memory)), 2)
    aliases = {(i, j) for i, j in pairs if memory[i] == memory[j]}
    allowed = {(i, j) for i, j in aliases if i < len(mutated) and mutated[i]}
    return [t.clone() for t in (*outputs, *inputs)], aliases, allowed


def difference(actual: Observed, expected: Observed) -> str | None:
    values, aliases, allowed = actual
    if not all(torch.equal(s, t) for s, t in zip(values, expected[0], strict=True)):
        return "other values"
    if not aliases - allowed <= expected[1] <= aliases:
        return f"other aliases: {aliases} with {allowed} allowed, not {expected[1]}"
    return None
