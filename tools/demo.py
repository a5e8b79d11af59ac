"""Shows issue #126773 on stock torch, and gone on the patched one, side by side.

    python -m tools.demo          (`make` builds first)

Two gloo ranks each run one training step whose wait is ignored. Stock drops the wait
from the forward graph, so the loss is read while the all-reduce is under way. Gloo may
win that race; the lazy group, whose results are NaN until they are waited for, cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
PATCHED = ROOT / "build" / "lib"
RANKS = 2
SIZE = 8388608
RIGHT = 2.0 * RANKS * SIZE
SECONDS = 180
COLUMN = 62


def step(group: str) -> tuple[str, float]:
    """The program: its forward graph as compiled, and the loss it gives."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    c10d = torch.ops._c10d_functional
    graphs = []

    def compiler(gm, example_inputs):
        graphs.append(gm.code)
        return make_boxed_func(gm.forward)

    def fn(x):
        y = c10d.all_reduce(x * 1, "sum", group)
        c10d.wait_tensor(y)
        return (y * 2).sum()

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    x = torch.ones(SIZE, requires_grad=True)
    loss = torch.compile(fn, backend=backend)(x)
    return graphs[0], loss.item()


def run_rank(rank: int, store: str) -> dict[str, Any]:
    """What one rank sees, with gloo and with the lazy group."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "test" / "distributed"))
    import lazy_process_group as lazy

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    graph, gloo_loss = step(dist.group.WORLD.group_name)
    registered = lazy.work_registry_size()
    torch._dynamo.reset()
    _, lazy_loss = step(dist.new_group(backend="lazy").group_name)
    return {
        "version": torch.__version__,
        "schema": str(torch.ops._c10d_functional.wait_tensor.default._schema),
        "graph": graph,
        "gloo": gloo_loss,
        "lazy": lazy_loss,
        "registered": registered,
    }


def run_ranks(pythonpath: Path | None) -> list[dict[str, Any]]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    print(f"run {RANKS} ranks on {'the patched' if pythonpath else 'stock'} torch ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--store", f"{scratch}/store"],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            done = [rank.communicate(timeout=SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired:
            sys.exit(f"demo: the ranks did not finish within {SECONDS} s; is this machine out of memory or very busy?")
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (out, err) in zip(ranks, done):
        if rank.returncode:
            which = "patched" if pythonpath else "stock"
            sys.exit(f"demo: a rank of the {which} torch failed:\n{err}")
    # The process group may print, too; the result is the last line.
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def has_bug(ranks: list[dict[str, Any]]) -> bool:
    """Whether any rank got a wrong loss or left a Work behind."""
    return any(r["gloo"] != RIGHT or r["lazy"] != RIGHT or r["registered"] for r in ranks)


def readable(graph: str) -> list[str]:
    """One op a line, without what is the same for every op."""
    lines = [line for line in graph.strip().splitlines() if line.strip()]
    return [re.sub(r"torch\.ops\.|\.default|\.Tensor|;.*", "", line) for line in lines]


def show(title: str, left: list[str], right: list[str]) -> None:
    print(f"\n{title}")
    for i in range(max(len(left), len(right))):
        pair = [(side[i] if i < len(side) else "") for side in (left, right)]
        print(f"  {pair[0]:<{COLUMN}}  {pair[1]}".rstrip())


def losses(ranks: list[dict[str, Any]], kind: str) -> list[str]:
    return [
        f"rank {i}: {r[kind]:.0f}{'' if r[kind] == RIGHT else f'   wrong, should be {RIGHT:.0f}'}"
        for i, r in enumerate(ranks)
    ]


def main() -> int:
    if not (PATCHED / "torch").is_dir():
        sys.exit(f"demo: there is no patched torch in {PATCHED}; run `make build` first")
    stock, patched = run_ranks(None), run_ranks(PATCHED)
    if "(a!)" in stock[0]["schema"]:
        sys.exit(f"demo: {sys.executable} has no stock torch to compare with; run `make distclean`, then `make`")

    print(f"One training step on {RANKS} gloo ranks, x = ones({SIZE}, requires_grad=True):\n")
    print('    y = all_reduce(x * 1, "sum", group); wait_tensor(y); return (y * 2).sum()')
    show("", [f"stock {stock[0]['version']}"], [f"patched {patched[0]['version']}"])
    names = [r[0]["schema"].removeprefix("_c10d_functional::") for r in (stock, patched)]
    show("Schema", names[:1], names[1:])
    show("Forward graph, as AOTAutograd hands it to the compiler", *(readable(r[0]["graph"]) for r in (stock, patched)))
    show("Loss (gloo: a race, sometimes won)", losses(stock, "gloo"), losses(patched, "gloo"))
    show("Loss (lazy group: NaN until waited for)", losses(stock, "lazy"), losses(patched, "lazy"))
    registered = [[f"rank {i}: {r['registered']}" for i, r in enumerate(side)] for side in (stock, patched)]
    show("Works left in the registry by the gloo step", *registered)

    print()
    for name, ranks in (("stock", stock), ("patched", patched)):
        print(f"{name} torch {ranks[0]['version']}: the bug is {'present' if has_bug(ranks) else 'absent'}")
    return 0 if has_bug(stock) and not has_bug(patched) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(main())
    print("\n" + json.dumps(run_rank(options.rank, options.store)), flush=True)
