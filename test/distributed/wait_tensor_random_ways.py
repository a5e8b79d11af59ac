"""Runs random programs, many in one compiled graph, and says which went wrong.

The programs of a batch share nothing but their process groups, so one compilation pays for
all, and buckets join collectives of several. What a program returns, leaves in its inputs and
gives as gradients is its own; an error, or a Work left behind, is pinned down by halving.
"""

import contextlib
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch._inductor.config
from lazy_process_group import lazy_group, overwritten, pending, Script, Shown, work_registry_size
from lazy_reads import watch_reads
from torch import Tensor
from torch._inductor.fx_passes import overlap_scheduling
from wait_tensor_random_programs import make_groups, Program


_TOLERANCE = 1e-9


def _estimate(node: torch.fx.Node, override_size=None) -> float:
    # Without it, overlap scheduling would time this machine.
    return float(node.target is torch.ops.aten.mm.default or "_c10d_functional" in str(node.target))


PASSES = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.custom_runtime_estimation": _estimate,
    "aten_distributed_optimizations.compute_estimator": "analytical",
    "aten_distributed_optimizations.collective_bucketing": True,
    # Both ask for a GPU's properties.
    "aten_distributed_optimizations.enable_fusion_regions": False,
    "aten_distributed_optimizations.pre_bucketing_fsdp_collectives": False,
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "bucket_all_reduces_fx": "all",
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
_ONE_PROCESS = {"compile_threads": 1, "fx_graph_cache": False}


@dataclass(frozen=True)
class Way:
    """How a batch is run. ``backend`` is None for eager, else one of torch.compile's."""

    backend: str | None
    config: dict

    def __call__(self, fn: Callable) -> Callable:
        if self.backend is None:
            return fn
        torch._dynamo.reset()
        return torch.compile(fn, backend=self.backend, fullgraph=True, dynamic=False)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        # The roofline of a device that is not there.
        roofline = unittest.mock.patch.object(
            overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0
        )
        with torch._inductor.config.patch(_ONE_PROCESS | self.config), roofline:
            yield


WAYS: dict[str, Way] = {
    "eager": Way(None, {}),
    "aot_eager": Way("aot_eager", {}),
    "inductor": Way("inductor", {}),
    "inductor_passes": Way("inductor", PASSES),
}


@dataclass
class Outcome:
    """What one program left; ``error`` where it left nothing."""

    tensors: list[Tensor | None]
    error: str = ""


class _Anonymous(Exception):
    """Something is wrong with one of the programs, but not said with which."""


def _once(programs: list[Program], way: Way, shown: Shown) -> list[Outcome]:
    script = Script(shown=shown)
    with lazy_group(4, simulated=True, allow_pending=True, script=script) as group:
        groups = make_groups()
        functions = [p.function(groups) for p in programs]
        inputs = [p.inputs(group) for p in programs]

        def batch(inputs):
            return [fn(*xs) for fn, xs in zip(functions, inputs)]

        watch = watch_reads() if way.backend is None else contextlib.nullcontext([])
        with way.context(), watch as early:
            results = way(batch)(inputs)
            losses = [y.sum() for ys in results for y in ys if y.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        outcomes = []
        for xs, ys in zip(inputs, results):
            tensors = [*ys, *xs, *(x.grad for x in xs)]
            outcomes.append(Outcome([t if t is None else t.detach().clone() for t in tensors]))
        if shown is Shown.AT_WAIT:
            if early:
                raise _Anonymous(f"early read: {early[0]}")
            if entries := overwritten():
                raise _Anonymous(f"written to in flight: {entries[0].collective}, {entries[0].overwritten}")
        if pending():
            raise _Anonymous(f"{pending()} collectives were never waited for")
        if work_registry_size():
            raise _Anonymous(f"{work_registry_size()} Works were left in the registry")
        return outcomes


def run(programs: list[Program], way: Way, shown: Shown = Shown.AT_WAIT) -> list[Outcome]:
    """What each program leaves, run in this way. All train, or none does."""
    try:
        return _once(programs, way, shown)
    except Exception as e:
        if len(programs) == 1:
            message = f"{type(e).__name__}: {e}".strip().splitlines()
            return [Outcome([], " ".join(message[:3])[:500])]
    half = len(programs) // 2
    return run(programs[:half], way, shown) + run(programs[half:], way, shown)


def reference(programs: list[Program]) -> list[Outcome]:
    """What each program should leave: eager, with results that are there at once."""
    outcomes = run(programs, WAYS["eager"], Shown.AT_ONCE)
    for program, outcome in zip(programs, outcomes):
        if outcome.error:
            raise AssertionError(f"a program that is wrong was drawn: {outcome.error}\n{program.source}")
    return outcomes


def difference(actual: Outcome, expected: Outcome) -> str:
    """What is wrong with an outcome; "" if nothing is."""
    if actual.error:
        return actual.error
    for i, (a, e) in enumerate(zip(actual.tensors, expected.tensors, strict=True)):
        if a is None and e is None:
            continue
        if a is None or e is None:
            return f"gradient {i} is {'missing' if a is None else 'there'}"
        if a.shape != e.shape or a.dtype != e.dtype:
            return f"tensor {i} is {a.dtype} {tuple(a.shape)}, not {e.dtype} {tuple(e.shape)}"
        if not torch.allclose(a, e, rtol=_TOLERANCE, atol=_TOLERANCE):
            return f"stale read: tensor {i} has poison" if a.isnan().any() else f"tensor {i} has wrong values"
    return ""


def batches(programs: Iterable[Program], size: int) -> list[list[Program]]:
    """Programs that train and those that do not, apart, at most ``size`` in a batch."""
    result = []
    programs = list(programs)
    for grad in (False, True):
        alike = [p for p in programs if p.grad is grad]
        result += [alike[i : i + size] for i in range(0, len(alike), size)]
    return result
