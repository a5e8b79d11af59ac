"""Inductor's code for distributed programs, stock torch against the patched one.

    python benchmarks/ab_codegen.py [--only PROGRAM] [--config CONFIG] [--world N] [--diff]

The claim under test is that a mutating wait costs nothing: after normalising what has
no meaning (numbers of buffers and kernels, comments), the code of each program of
ab_programs.py under each configuration is stock's, or the difference is listed below in
EXPECTED_DIFFERENCES with its reason, and no count is worse. Anything else fails.

One worker process a side compiles everything. On the fake process group a program is
traced once a variant (that is the slow part), and its graphs are compiled once a
configuration, from copies; no C++ compiler runs and no generated code is executed: the
traced graph itself runs eagerly, so that a backward follows a forward. What the kernels
compute is checked in the other mode, on two real gloo ranks a side, where the results
of three steps must agree bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import fnmatch
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
PATCHED = ROOT / "build" / "lib"
RESULTS = ROOT / "benchmarks" / "results" / "ab_codegen.json"
WORLDS = (2, 8, 1024)
STEPS = 3

# --- what is compared ------------------------------------------------------------------

# What only the graph that is lowered depends on. A value "estimate" stands for the
# function of that name: without it, overlap scheduling would benchmark on this machine.
_OVERLAP = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.custom_runtime_estimation": "estimate",
    "aten_distributed_optimizations.collective_bucketing": False,
}
_BUCKETING = _OVERLAP | {"aten_distributed_optimizations.collective_bucketing": True}
_MODE = "aten_distributed_optimizations.bucket_mode"
_PASSES = "reorder_for_compute_comm_overlap_passes"
_REORDER = {"reorder_for_compute_comm_overlap": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "reorder": _REORDER
    | {
        _PASSES: [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ]
    },
    "reorder_simple": _REORDER | {_PASSES: ["reorder_compute_for_overlap", "sink_waits", "raise_comms"]},
    **{
        f"bucket_ag_{fx}_{mode}": {"bucket_all_gathers_fx": fx, "bucket_all_gathers_bucket_mode": mode}
        for fx in ("all", "only_fsdp")
        for mode in ("default", "custom_ops", "custom_ops_multidtype")
    },
    **{
        f"bucket_rs_{fx}_{mode}": {"bucket_reduce_scatters_fx": fx, "bucket_reduce_scatters_bucket_mode": mode}
        for fx in ("all", "only_fsdp")
        for mode in ("default", "custom_ops", "coalesced")
    },
    "bucket_ar": {"bucket_all_reduces_fx": "all"},
    "bucket_everything": {
        "bucket_all_gathers_fx": "all",
        "bucket_reduce_scatters_fx": "all",
        "bucket_all_reduces_fx": "all",
    },
    "overlap": _OVERLAP,
    "overlap_no_deps": _OVERLAP | {"aten_distributed_optimizations.insert_overlap_deps": False},
    "overlap_bucketing": _BUCKETING,
    "overlap_bucketing_no_deps": _BUCKETING | {"aten_distributed_optimizations.insert_overlap_deps": False},
    **{
        f"overlap_bucketing_{mode}": _BUCKETING | {_MODE: mode}
        for mode in ("custom_ops", "custom_ops_multidtype", "coalesced")
    },
    "overlap_reorder": _BUCKETING | _REORDER | {_PASSES: ["sink_waits", "raise_comms"]},
    "micro_pipeline_tp": {"_micro_pipeline_tp": True},
    "fuse_ddp_concat": {
        "_fuse_ddp_communication": True,
        "_fuse_ddp_communication_passes": ["fuse_ddp_with_concat_op", "schedule_comm_wait"],
    },
    "fuse_ddp_coalesced": {
        "_fuse_ddp_communication": True,
        "_fuse_ddp_communication_passes": ["fuse_ddp_with_coalesced_op", "schedule_comm_wait"],
    },
    "low_contention": {
        "aten_distributed_optimizations.enable_low_contention_collectives": True,
        "aten_distributed_optimizations.low_contention_skip_overlap_check": True,
        "aten_distributed_optimizations.low_contention_min_bytes_per_rank": 0,
    },
    "low_contention_overlap": {
        "aten_distributed_optimizations.enable_low_contention_collectives": True,
        "aten_distributed_optimizations.low_contention_min_bytes_per_rank": 0,
    },
    "comms_decompositions": {"aten_distributed_optimizations.allow_comms_decompositions": True},
    "dedup_reduce_scatters": {"dedup_reduce_scatters": True},
    "cpp_wrapper": {"cpp_wrapper": True},
    "graph_partition_off": {"graph_partition": False},
    # CPU nodes are never in a CUDA graph; the worker asks the scheduler as if they were on a GPU.
    "cudagraph_partition": {"graph_partition": True, "triton.cudagraphs": True},
    "no_reorder_for_locality": {"reorder_for_locality": False},
    "no_peak_memory": {"reorder_for_peak_memory": False, "allow_buffer_reuse": False, "inplace_buffers": False},
    "memory_planning": {"memory_planning": True},
}

# What a program is traced under, and which configurations each trace is compiled under.
_FEW = (
    "default",
    "reorder",
    "bucket_everything",
    "overlap_bucketing",
    "micro_pipeline_tp",
    "fuse_ddp_concat",
    "cpp_wrapper",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": tuple(CONFIGS),
    "dynamic": _FEW,
    "compiled_autograd": tuple(CONFIGS),
    "checkpoint": _FEW,
    "sac": _FEW,
    "memory_budget": _FEW,
    "no_grad": ("default", "overlap_bucketing"),
}
TRAINING_VARIANTS = ("compiled_autograd", "checkpoint", "sac", "memory_budget", "no_grad")
# What is run on two ranks: what changes the order of collectives and waits, or fuses them.
GLOO = {
    "plain": ("default", "reorder", "bucket_everything", "overlap_bucketing", "fuse_ddp_concat", "cpp_wrapper"),
    "dynamic": ("default",),
    "compiled_autograd": ("default", "fuse_ddp_concat", "fuse_ddp_coalesced"),
    "checkpoint": ("default",),
    "sac": ("default",),
}

# (program, variant, configuration), each a pattern: why the code may differ there. A
# difference that is worse in a count is never expected.
EXPECTED_DIFFERENCES: dict[tuple[str, str, str], str] = {
    ("wait_on_leaf", "compiled_autograd", "*"): "the waited tensor is saved, not the leaf: one argument more, not read",
    (
        "wait_on_slice_of_input",
        "*",
        "*",
    ): "waits on the whole input, for a Work belongs to a storage; stock on the slice",
}

# --- counting and normalising, on text alone --------------------------------------------

# As an op, in a call or as a comment's origin; a node's name is only a name.
_FUNCTIONAL = r"_c10d_functional[._]_?_wait_tensor_functional"
COUNTED = {
    "kernels": r"\bcpp_fused\w*\(|\bcpp_(?!fused|wrapper|pybinding)\w+\(",
    "extern": r"\bextern_kernels\.\w+\(|torch\.ops\.(?!_c10d_functional\.)\w+\.\w+(?:\.\w+)?\(|aoti_torch_cpu_(?!_c10d)\w+\(",
    "buffers": r"\b(?:aoti_torch_)?(?:empty_strided\w*|alloc_from_pool)\(",
    "copies": r"\.copy_\(|aten\.(?:clone|copy|copy_)\b|aoti_torch_(?:cpu_)?(?:copy_|clone)\w*\(|copy_misaligned\(",
    "collectives": r"_c10d_functional\.(?!wait_tensor|_wait)\w+\.\w+\(|_c10d_functional_(?!wait_tensor|_wait)\w+\(",
    "waits": r"_c10d_functional[._]wait_tensor(?:\.default)?\(",
    "functional waits": _FUNCTIONAL,
    "partitions": r"\bdef partition_\d+\(",
}
_ITEMSIZE = {"bool": 1, "8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def _without_comments(code: str) -> str:
    """Drop Python's and C++'s comments, but no preprocessor line of a kernel's source."""
    code = re.sub(r"/\*.*?\*/", "", code, flags=re.DOTALL)
    code = re.sub(r"^[ \t]*#(?!include|pragma|if|ifdef|else|endif|define).*\n", "", code, flags=re.MULTILINE)
    code = re.sub(r"[ \t]+# .*$", "", code, flags=re.MULTILINE)
    code = re.sub(r"(?<![:\"'])//.*$", "", code, flags=re.MULTILINE)
    return re.sub(r"\n\s*\n+", "\n", code)


def _without_benchmark(code: str) -> str:
    """Drop what Inductor appends for whoever runs the code by hand; no call runs it."""
    return re.split(r"\ndef (?:get_args|benchmark_compiled_module)\(", code)[0]


def body(code: str) -> str:
    """The wrapper: what runs in each call. Without comments, kernels and benchmarks."""
    code = _without_benchmark(_without_comments(code))
    if "inductor_entry_impl(" in code:
        # C++: every function but the kernels, whose definitions are extern "C".
        code = code[code.index("cpp_wrapper_src") :]
        return re.sub(r'extern "C"[^;{]*(?:;|\{.*?^\})', "", code, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"r?'''.*?'''|r?\"\"\".*?\"\"\"", "''", code, flags=re.DOTALL)


def _itemsize(dtype: str) -> int:
    if dtype == "bool":
        return 1
    if dtype.startswith("complex"):
        return int(dtype[7:]) // 8
    digits = re.search(r"\d+", dtype)
    return _ITEMSIZE.get(digits.group(), 4) if digits else 4


def _bytes(sizes: str, strides: str, dtype: str) -> int:
    """What an empty_strided allocates. A symbol counts as 7: on both sides the same."""

    def numbers(text: str) -> list[int]:
        text = re.sub(r"(?<=\d)L\b", "", text)
        text = re.sub(r"\b[A-Za-z_]\w*\b(?!\()", "7", text)
        try:
            return [int(eval(part, {"__builtins__": {}})) for part in text.split(",") if part.strip()]
        except Exception:
            return [7]

    size, stride = numbers(sizes), numbers(strides)
    if 0 in size:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(size, stride))) * _itemsize(dtype)


def counts(code: str) -> dict[str, int]:
    """What one graph's generated code does in a call."""
    text = body(code)
    result = {what: len(re.findall(pattern, text)) for what, pattern in COUNTED.items()}
    # A comment that names the op counts, too: none should be left.
    result["functional waits"] = len(re.findall(_FUNCTIONAL, code))
    allocated = sum(
        _bytes(*match) for match in re.findall(r"empty_strided\w*\(\((.*?)\), \((.*?)\), torch\.(\w+)", text)
    )
    arrays = dict(re.findall(r"(int_array_\d+)\[\] = \{(.*?)\}", text))
    for size, stride, dtype in re.findall(
        r"aoti_torch_empty_strided\(\d+, (\w+), (\w+), cached_torch_dtype_(\w+)", text
    ):
        allocated += _bytes(arrays.get(size, ""), arrays.get(stride, ""), dtype)
    result["bytes"] = allocated
    return result


def _renumbered(text: str, patterns: dict[str, str]) -> str:
    for prefix, pattern in patterns.items():
        names: dict[str, str] = {}
        text = re.sub(pattern, lambda m: names.setdefault(m.group(), f"{prefix}{len(names)}"), text)
    return text


def normalised(code: str) -> str:
    """The code without what has no meaning: comments, numbers of buffers and of kernels."""
    code = _without_benchmark(_without_comments(code))
    # A placeholder is named after the node that was saved for it, of which only one of
    # several equal ones may be in the graph; its position is what callers go by.
    placeholders = {name for line in re.findall(r"^ *(.*?),? = args$", code, re.MULTILINE) for name in line.split(", ")}
    placeholders |= set(re.findall(r"^ *auto (\w+) = std::move\(inputs\[\d+\]\);", code, re.MULTILINE))
    placeholders |= set(re.findall(r"\(inputs\[\d+\], &(\w+)\)", code))
    if placeholders:
        code = _renumbered(code, {"arg_": rf"(?<![.\w])(?:{'|'.join(map(re.escape, placeholders))})\b"})
    # What is released between two calls has no order.
    code = re.sub(
        r"(?:^ *(?:del \w+|\w+\.reset\(\);)\n){2,}", lambda m: "\n".join(sorted(m.group().splitlines())) + "\n", code, flags=re.MULTILINE
    )
    return _renumbered(
        code,
        {
            "buf_": r"\bbuf\d+",
            "kernel_": r"\bcpp_fused\w*?_\d+\b",
            "array_": r"\bint_array_\d+",
            "s_": r"\bsubgraph_\w+",
        },
    )


@dataclass
class Comparison:
    """One program, traced as one variant, under one configuration."""

    key: tuple[str, str, str, str]  # mode and world, program, variant, configuration
    verdict: str
    detail: str = ""
    reason: str = ""
    failed: bool = False
    counts: dict[str, Any] = field(default_factory=dict)
    graph_equal: bool | None = None
    # Of the patched side's normalised code: does a configuration change anything at all?
    code: str = ""
    diff: str = ""


def expected(program: str, variant: str, config: str) -> str:
    for pattern, reason in EXPECTED_DIFFERENCES.items():
        if all(fnmatch.fnmatchcase(*pair) for pair in zip((program, variant, config), pattern)):
            return reason
    return ""


def unified(stock: str, patched: str) -> str:
    return "\n".join(
        difflib.unified_diff(stock.splitlines(), patched.splitlines(), "stock", "patched", n=2, lineterm="")
    )


def compare_code(key: tuple[str, str, str, str], stock: dict, patched: dict) -> Comparison:
    """The verdict on one configuration's graphs. Worse in a count is never excused."""
    errors = stock["error"], patched["error"]
    if all(errors):
        # Whether the messages agree is shown, not judged: they hold names and addresses.
        return Comparison(key, "both fail", errors[0].splitlines()[0][:200], diff=errors[0])
    if any(errors):
        which = "stock fails" if errors[0] else "PATCHED FAILS"
        reason = expected(*key[1:])
        return Comparison(key, which, next(filter(None, errors)), reason, failed=bool(errors[1]) or not reason)
    ours, theirs = patched["graphs"], stock["graphs"]
    if len(ours) != len(theirs):
        return Comparison(key, "DIFFERENT", f"{len(theirs)} graphs became {len(ours)}", failed=True)
    if not ours:
        return Comparison(key, "no graph")
    before, after = ([counts(g["code"]) for g in side] for side in (theirs, ours))
    diffs = [unified(normalised(a["code"]), normalised(b["code"])) for a, b in zip(theirs, ours)]
    fx = [unified(a["fx"], b["fx"]) for a, b in zip(theirs, ours)]
    worse, better = set(), set()
    for a, b in zip(before, after):
        worse |= {f"{what} {a[what]} -> {b[what]}" for what in a if b[what] > a[what]}
        better |= {f"{what} {a[what]} -> {b[what]}" for what in a if b[what] < a[what]}
    result = Comparison(
        key,
        "equal",
        counts={"stock": before, "patched": after} if before != after else {"both": before},
        graph_equal=not any(fx),
        code=hashlib.sha256("".join(normalised(g["code"]) for g in ours).encode()).hexdigest()[:12],
        diff="\n".join(f"--- graph {i}\n{d}" for i, d in enumerate(diffs) if d),
    )
    if not result.graph_equal:
        result.diff += "\n".join(f"\n--- post-grad graph {i}\n{d}" for i, d in enumerate(fx) if d)
    if worse:
        result.verdict, result.detail, result.failed = "WORSE", ", ".join(sorted(worse)), True
    elif any(diffs):
        result.reason = expected(*key[1:])
        result.verdict = "better" if better else "different"
        result.detail = ", ".join(sorted(better)) or f"{sum(map(bool, diffs))} of {len(diffs)} graphs"
        result.failed = not result.reason
    return result


def compare_results(key: tuple[str, str, str, str], stock: list[dict], patched: list[dict]) -> Comparison:
    """Bit for bit, each rank's tensors after each step."""
    sides = stock, patched
    errors = [next((rank["error"] for rank in side if rank["error"]), None) for side in sides]
    if all(errors):
        return Comparison(key, "both fail", errors[0].splitlines()[0][:200], diff=errors[0])
    if any(errors):
        which = "stock fails" if errors[0] else "PATCHED FAILS"
        reason = expected(*key[1:])
        return Comparison(key, which, next(filter(None, errors)), reason, failed=bool(errors[1]) or not reason)
    for rank, (a, b) in enumerate(zip(stock, patched)):
        for step, (x, y) in enumerate(zip(a["steps"], b["steps"])):
            if x != y:
                where = [i for i, pair in enumerate(zip(x, y)) if pair[0] != pair[1]]
                detail = f"rank {rank}, step {step}, tensors {where} of {len(x)}"
                reason = expected(*key[1:])
                return Comparison(key, "DIFFERENT", detail, reason, failed=not reason, diff=f"{x}\n{y}")
    return Comparison(key, "equal")


# --- the worker: runs in one of the two torches -------------------------------------------


def estimate(node, override_size=None):
    """Run times in ms that any machine agrees on: a matmul hides about two collectives."""
    import torch

    if isinstance(node.target, torch._ops.OpOverload):
        if node.target.namespace == "_c10d_functional":
            return 1.0
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
            return 2.0
    return None


@contextlib.contextmanager
def configured(name: str) -> Iterator[None]:
    import torch
    from torch._inductor import config, scheduler
    from torch.distributed._symmetric_memory import _test_mode

    settings = {k: estimate if v == "estimate" else v for k, v in CONFIGS[name].items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        if name == "cpp_wrapper":
            stack.enter_context(config.patch(torch._inductor.compile_fx.get_cpp_wrapper_config()))
        if name == "micro_pipeline_tp" or name.startswith("low_contention"):
            stack.enter_context(_test_mode())
            # The pass asks only whether torch has NCCL; it needs none to rewrite a graph.
            stack.enter_context(unittest.mock.patch("torch.distributed.is_nccl_available", lambda: True))
        if name == "cudagraph_partition":
            stack.enter_context(_as_if_on_a_gpu(scheduler))
        yield


@contextlib.contextmanager
def _as_if_on_a_gpu(scheduler) -> Iterator[None]:
    """Let should_partition see every node as one on a GPU; nothing else may."""
    ask, is_gpu = scheduler.Scheduler.should_partition, scheduler.BaseSchedulerNode.is_gpu

    def should_partition(self, node):
        scheduler.BaseSchedulerNode.is_gpu = lambda _: True
        try:
            return ask(self, node)
        finally:
            scheduler.BaseSchedulerNode.is_gpu = is_gpu

    scheduler.Scheduler.should_partition = should_partition
    try:
        yield
    finally:
        scheduler.Scheduler.should_partition = ask


def describe(gm) -> str:
    """A graph with its nodes numbered, since FX's names are made unique by history."""
    import torch

    number: dict[Any, str] = {}
    lines = []
    for node in gm.graph.nodes:
        number[node] = f"%{len(number)}"
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(number[n]))
        target = node.op if node.op in ("placeholder", "output") else str(node.target)
        value = node.meta.get("val")
        shape = f" {value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{number[node]} = {target}{args}{shape}")
    return re.sub(r" at 0x\w+", "", "\n".join(lines))


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


class Executed(Exception):
    """The traced graph failed when run. Fake collectives give garbage; some programs choke on it."""


class Worker:
    """Compiles or runs what it is told, in whatever torch it was started with."""

    def __init__(self, rank: int, store: str):
        import torch
        import torch._dynamo.compiled_autograd
        import torch._functorch.config
        import torch._inductor.compile_fx
        import torch.distributed as dist
        import torch.utils._runtime_estimation

        sys.path.insert(0, str(Path(__file__).parent))
        import ab_programs

        torch.set_num_threads(1)
        torch._inductor.config.force_disable_caches = True
        torch._inductor.config.compile_threads = 1
        self.torch, self.dist, self.programs = torch, dist, ab_programs
        self.rank, self.store = rank, store
        # Asked of Triton otherwise, which a machine without a GPU lacks.
        torch.utils._runtime_estimation.get_gpu_dram_gbps = lambda: 1000
        self.group: tuple[str, int] | None = None
        self.recorded: dict | None = None
        self._hook()

    def _hook(self) -> None:
        """Record the code and the lowered graph; load no module while recording."""
        from types import SimpleNamespace

        from torch._inductor import compile_fx
        from torch._inductor.graph import GraphLowering

        load, passes, worker = GraphLowering._compile_to_module_lines, compile_fx._recursive_post_grad_passes, self
        depth = 0

        def compile_to_module_lines(graph, wrapper_code):
            if worker.recorded is None:
                return load(graph, wrapper_code)
            worker.recorded["code"] = wrapper_code.value
            graph.cache_key, graph.cache_path, graph.cache_linemap = "", __file__, []
            return SimpleNamespace(call=lambda args: (), __file__=__file__)

        def post_grad_passes(gm, *args, **kwargs):
            nonlocal depth
            depth += 1
            try:
                passes(gm, *args, **kwargs)
            finally:
                depth -= 1
            if worker.recorded is not None and depth == 0:
                worker.recorded["fx"] = describe(gm)

        GraphLowering._compile_to_module_lines = compile_to_module_lines
        compile_fx._recursive_post_grad_passes = post_grad_passes

    def init_group(self, backend: str, world: int) -> None:
        if self.group == (backend, world):
            return
        if self.group is not None:
            self.dist.destroy_process_group()
        if backend == "fake":
            from torch.testing._internal.distributed.fake_pg import FakeStore

            self.dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        else:
            from datetime import timedelta

            store = self.dist.FileStore(self.store, world)
            self.dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=world, timeout=timedelta(seconds=120)
            )
        self.group = backend, world

    def make(self, program: str) -> Callable:
        made = self.programs.PROGRAMS[program]
        stock = "(a!)" not in str(self.torch.ops._c10d_functional.wait_tensor.default._schema)
        return made.on_stock if stock and made.on_stock else made.make

    def compile_everywhere(self, configs: list[str], records: dict[str, dict]) -> Callable:
        """A compile_fx_inner that compiles a copy of the graph once a configuration, then runs it as it is."""
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.output_code import MockFXGraphCacheOutput

        def inner(gm, example_inputs, **kwargs):
            context = self.torch._guards.TracingContext.try_get()
            strides = context and context.output_strides
            for name in configs:
                record = records[name]
                if record["error"]:
                    continue
                self.recorded = {"code": "", "fx": ""}
                try:
                    with configured(name):
                        cpp = {"cpp_wrapper": True} if name == "cpp_wrapper" else {}
                        compile_fx_inner(copy.deepcopy(gm), example_inputs, **(kwargs | cpp))
                    record["graphs"].append(self.recorded)
                except Exception as e:
                    record["error"] = f"{type(e).__name__}: {e}\n" + "".join(traceback.format_exc()[-2500:])
                finally:
                    self.recorded = None
                    if context:
                        # Only one compilation may report the strides it chose: the first.
                        context.output_strides = None
            if context:
                context.output_strides = strides

            def run(inputs):
                args = list(inputs)
                inputs.clear()
                try:
                    return gm.forward(*args)
                except Exception as e:
                    raise Executed(str(e)) from e

            return MockFXGraphCacheOutput(gm=run)

        return inner

    def env(self, variant: str, backend: Any, world: int, options: dict | None = None):
        torch = self.torch

        def compile(fn, fullgraph=True):
            return torch.compile(
                fn, backend=backend, fullgraph=fullgraph, dynamic=variant == "dynamic", options=options
            )

        def policy(ctx, op, *args, **kwargs):
            from torch.utils.checkpoint import CheckpointPolicy

            # Keep what was communicated and every second kind of compute; recompute the rest.
            saved = op.namespace == "_c10d_functional" or op is torch.ops.aten.mm.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        def checkpoint(fn, *args):
            from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

            if variant == "checkpoint":
                return checkpoint(fn, *args, use_reentrant=False)
            if variant == "sac":
                context = functools.partial(create_selective_checkpoint_contexts, policy)
                return checkpoint(fn, *args, use_reentrant=False, context_fn=context)
            return fn(*args)

        import functools

        def backward():
            if variant != "compiled_autograd":
                return contextlib.nullcontext()
            return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, options=options))

        return self.programs.Env(self.rank, world, self.dist.group.WORLD.group_name, compile, checkpoint, backward)

    @contextlib.contextmanager
    def traced_as(self, variant: str) -> Iterator[None]:
        torch = self.torch
        torch._dynamo.reset()
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            if variant == "memory_budget":
                stack.enter_context(torch._functorch.config.patch(activation_memory_budget=0.3))
                # A process group is an argument of DTensor's graphs.
                stack.enter_context(torch._functorch.config.patch(unsafe_treat_script_objects_as_zero_size=True))
            if variant == "no_grad":
                stack.enter_context(torch.no_grad())
            if variant == "compiled_autograd":
                stack.enter_context(torch._dynamo.config.patch(compiled_autograd=False))
            yield

    def fake(self, world: int, program: str, variant: str, configs: list[str]) -> dict[str, dict]:
        from torch._inductor.compile_fx import compile_fx

        self.init_group("fake", world)
        records: dict[str, dict] = {name: {"graphs": [], "error": None} for name in configs}
        inner = self.compile_everywhere(configs, records)
        with self.traced_as(variant):
            env = self.env(variant, lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner), world)
            try:
                self.make(program)(env)()
            except Exception as e:
                if not _caused_by(e, Executed) and not (variant == "no_grad" and "does not require grad" in str(e)):
                    message = f"{type(e).__name__}: {e}\n" + traceback.format_exc()[-2500:]
                    for record in records.values():
                        record["error"] = record["error"] or message
        return records

    def gloo(self, world: int, program: str, variant: str, config: str) -> dict:
        torch = self.torch
        self.init_group("gloo", world)
        steps: list[list[str]] = []
        error = None
        with self.traced_as(variant), configured(config):
            torch._inductor.config.force_disable_caches = False
            try:
                step = self.make(program)(self.env(variant, "inductor", world))
                for _ in range(STEPS if self.programs.PROGRAMS[program].trains else 1):
                    tensors = torch.utils._pytree.tree_leaves(step())
                    steps.append([digest(t) for t in tensors if isinstance(t, torch.Tensor)])
            except Exception as e:
                error = f"{type(e).__name__}: {e}\n" + traceback.format_exc()[-2500:]
        return {"steps": steps, "error": error}

    def serve(self, lines: Iterable[str], answer: Callable[[Any], None]) -> None:
        import torch

        answer(torch.__version__)
        for line in lines:
            job = json.loads(line)
            answer(getattr(self, job.pop("mode"))(**job))


def digest(t) -> str:
    """A tensor's bits, and its norm for whoever has to look at a difference."""
    import torch

    if hasattr(t, "to_local"):
        t = t.to_local()
        t = t.wait() if hasattr(t, "wait") else t
    t = t.detach().contiguous().resolve_conj().resolve_neg()
    bits = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return f"{tuple(t.shape)} {t.dtype} {hashlib.sha256(bits).hexdigest()[:16]} {t.to(torch.complex128).norm().item():.17g}"


def _caused_by(e: BaseException | None, kind: type) -> bool:
    while e is not None:
        if isinstance(e, kind):
            return True
        e = e.__cause__ or e.__context__
    return False


# --- the parent -----------------------------------------------------------------------------


class Side:
    """The worker processes of one torch: one for the fake group, one a rank for gloo."""

    def __init__(self, name: str, pythonpath: Path | None, ranks: int, log: Path, timeout: float):
        self.name, self.pythonpath, self.ranks, self.log, self.timeout = name, pythonpath, ranks, log, timeout
        self.version = ""
        self.workers: list[subprocess.Popen] = []

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # One thread a process, so that sums have one order.
        env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache_dir()), "PYTHONHASHSEED": "0"}
        # Believe what the CPU says that it can do, and do not compile programs to find out.
        env["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        if self.pythonpath:
            env["PYTHONPATH"] = str(self.pythonpath)
        store = tempfile.mktemp(prefix="ab_store_")
        with open(self.log, "ab") as log:
            self.workers = [
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", str(rank), store],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
                for rank in range(self.ranks)
            ]
        answer = self.receive()
        self.version = answer if isinstance(answer, str) else answer[0]

    def send(self, job: dict) -> None:
        if not self.workers:
            self.start()
        for worker in self.workers:  # none, if it could not be started
            worker.stdin.write((json.dumps(job) + "\n").encode())
            worker.stdin.flush()

    def receive(self) -> list[Any] | str:
        """Each worker's answer, or why there is none."""
        if not self.workers:
            return f"no worker could be started; its output is in {self.log}"
        until = time.monotonic() + self.timeout
        answers = []
        for worker in self.workers:
            if not select.select([worker.stdout], [], [], max(0, until - time.monotonic()))[0]:
                self.stop()
                return f"no answer in {self.timeout:.0f} s; its output is in {self.log}"
            line = worker.stdout.readline()
            if not line:
                code = worker.wait()
                self.stop()
                return f"a worker stopped with {code}; its output is in {self.log}"
            answers.append(json.loads(line))
        return answers

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.workers = []


def cache_dir() -> Path:
    """The sources of both sides' kernels are the same, so each is compiled once."""
    return Path(tempfile.gettempdir()) / f"ab_codegen_cache_{os.getuid()}"


@dataclass(frozen=True)
class Options:
    only: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    worlds: tuple[int, ...] = WORLDS
    modes: tuple[str, ...] = ("fake", "gloo")
    patched: Path = PATCHED
    log_dir: Path = Path(tempfile.gettempdir())
    timeout: float = 300.0


def chosen(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)


def jobs(options: Options, programs: dict[str, bool]) -> Iterator[dict]:
    """What to run, given the programs' names and whether each trains."""
    for mode in options.modes:
        table = VARIANTS if mode == "fake" else GLOO
        for world in options.worlds if mode == "fake" else (2,):
            for name, trains in programs.items():
                for variant, configs in table.items():
                    picked = [c for c in configs if chosen(c, options.configs)]
                    if not chosen(name, options.only) or not chosen(variant, options.variants) or not picked:
                        continue
                    if variant in TRAINING_VARIANTS and not trains:
                        continue
                    # The largest world only makes numbers larger: the few configurations are enough.
                    if mode == "fake" and world > 64 and not options.configs:
                        if variant not in ("plain", "compiled_autograd"):
                            continue
                        picked = [c for c in picked if c in _FEW or c.startswith("bucket_") and "default" in c]
                    if mode == "fake":
                        yield {"mode": mode, "world": world, "program": name, "variant": variant, "configs": picked}
                    else:
                        for config in picked:
                            yield {"mode": mode, "world": world, "program": name, "variant": variant, "config": config}


def list_programs() -> dict[str, dict]:
    """Asked of a process of its own: the parent must not import either torch."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import ab_programs as p;"
        "print(json.dumps({n: {'trains': q.trains, 'fake': not q.gloo_only, 'gloo': not q.fake_only, 'max_world': q.max_world}"
        " for n, q in p.PROGRAMS.items()}))"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    out = subprocess.check_output([sys.executable, "-c", code, str(Path(__file__).parent)], env=env, text=True)
    return json.loads(out)


def run(
    options: Options, report: Callable[[Comparison], None], results: list[Comparison] | None = None
) -> list[Comparison]:
    """Compare all that was chosen. What is known so far stands in ``results`` if it is interrupted."""
    programs = list_programs()
    results = [] if results is None else results
    for mode in options.modes:
        ranks = 1 if mode == "fake" else 2
        sides = [
            Side("stock", None, ranks, options.log_dir / f"ab_{mode}_stock.{os.getpid()}.log", options.timeout),
            Side(
                "patched",
                options.patched,
                ranks,
                options.log_dir / f"ab_{mode}_patched.{os.getpid()}.log",
                options.timeout,
            ),
        ]
        try:
            for side in sides:
                side.start()
            versions = [side.version for side in sides]
            if "issue126773" in versions[0] or "issue126773" not in versions[1]:
                sys.exit(f"ab_codegen: need a stock and a patched torch, have {versions}")
            trains = {n: p["trains"] for n, p in programs.items() if p[mode]}
            for job in jobs(Options(**(vars(options) | {"modes": (mode,)})), trains):
                if job["world"] > programs[job["program"]]["max_world"]:
                    continue
                for side in sides:
                    side.send(job)
                answers = [side.receive() for side in sides]
                where = f"{mode}{job['world']}", job["program"], job["variant"]
                for config in job.get("configs") or [job["config"]]:
                    pair = []
                    for answer in answers:
                        if isinstance(answer, str):
                            answer = [{"error": answer, "steps": [], config: {"error": answer, "graphs": []}}]
                        pair.append(answer[0][config] if mode == "fake" else answer)
                    compare = compare_code if mode == "fake" else compare_results
                    result = compare((*where, config), *pair)
                    results.append(result)
                    report(result)
                if mode == "gloo" and any(r["error"] for a in answers if not isinstance(a, str) for r in a):
                    # A rank that failed has left the other in the middle of something.
                    for side in sides:
                        side.stop()
        finally:
            for side in sides:
                side.stop()
    return results


def table(results: list[Comparison]) -> str:
    """A row a program; equal configurations are counted, others are named."""
    rows: dict[str, dict[str, list[Comparison]]] = {}
    for r in results:
        rows.setdefault(r.key[1], {}).setdefault(r.verdict, []).append(r)
    lines = []
    for program, verdicts in rows.items():
        summary = ", ".join(f"{len(rs)} {verdict}" for verdict, rs in verdicts.items())
        lines.append(f"{program:<32}{summary}")
        for verdict, rs in verdicts.items():
            if verdict in ("equal", "no graph"):
                continue
            groups: dict[tuple[str, str], list[str]] = {}
            for r in rs:
                detail = r.reason or r.detail.splitlines()[0][:150] if r.reason or r.detail else ""
                groups.setdefault((r.verdict, detail), []).append("/".join((r.key[0], *r.key[2:])))
            for (what, detail), keys in groups.items():
                shown = " ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
                lines.append(f"    {what}: {detail}\n        {shown}")
    return "\n".join(lines)


def fired(results: Iterable[Comparison]) -> dict[str, set[str]]:
    """The programs whose code each configuration changes. Where none, its pass was not tested."""
    results = [r for r in results if r.code]
    default = {r.key[:3]: r.code for r in results if r.key[3] == "default"}
    changed: dict[str, set[str]] = {r.key[3]: set() for r in results if r.key[3] != "default"}
    for r in results:
        if default.get(r.key[:3], r.code) != r.code:
            changed[r.key[3]].add(r.key[1])
    return changed


def save(results: list[Comparison], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {k: v for k, v in vars(r).items() if k not in ("diff", "failed") and v not in ("", None, {})}
        | {"key": "/".join(r.key)}
        for r in results
    ]
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="PROGRAM", help="a name or pattern; may repeat")
    parser.add_argument("--config", action="append", default=[], help="a name or pattern; may repeat")
    parser.add_argument("--variant", action="append", default=[], help="a name or pattern; may repeat")
    parser.add_argument("--world", action="append", type=int, default=[], help=f"of the fake group; default {WORLDS}")
    parser.add_argument("--mode", action="append", choices=("fake", "gloo"), default=[])
    parser.add_argument("--diff", action="store_true", help="print each normalised difference")
    parser.add_argument("--list", action="store_true", help="print the programs, variants and configurations")
    parser.add_argument("--patched", type=Path, default=PATCHED, help="the patched torch's PYTHONPATH")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        # Whatever else prints goes to stderr; the pipe is for answers.
        pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

        def answer(value):
            pipe.write(json.dumps(value) + "\n")
            pipe.flush()

        Worker(int(arguments.worker[0]), arguments.worker[1]).serve(sys.stdin, answer)
        return 0
    if arguments.list:
        for what, names in {"programs": list_programs(), "variants": VARIANTS, "configurations": CONFIGS}.items():
            print(f"{len(names)} {what}: {', '.join(names)}\n")
        return 0
    options = Options(
        only=tuple(arguments.only),
        configs=tuple(arguments.config),
        variants=tuple(arguments.variant),
        worlds=tuple(arguments.world) or WORLDS,
        modes=tuple(arguments.mode) or ("fake", "gloo"),
        patched=arguments.patched,
    )
    started, seen = time.monotonic(), 0

    def report(r: Comparison) -> None:
        nonlocal seen
        seen += 1
        line = f"[{time.monotonic() - started:5.0f} s {seen:5}] {' '.join(r.key)}: {r.verdict}"
        if r.verdict == "equal" and not r.graph_equal and r.graph_equal is not None:
            line += " (its post-grad graph differs)"
        if r.verdict not in ("equal", "no graph") or "differs" in line:
            print(line, r.detail.splitlines()[0][:200] if r.detail else "", r.reason, flush=True)
            if arguments.diff:
                print(r.detail, r.diff, sep="\n")
        elif sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif seen % 50 == 0:
            print(line, flush=True)

    results: list[Comparison] = []
    try:
        run(options, report, results)
    except KeyboardInterrupt:
        print("\ninterrupted; what was compared so far:")
    save(results, arguments.out)
    failures = [r for r in results if r.failed]
    print("\n" + table(results))
    for config, programs in fired(results).items():
        print(f"{config:<40} changes the code of {len(programs)} programs")
    print(f"\n{len(results)} comparisons in {time.monotonic() - started:.0f} s, {len(failures)} not as they must be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
