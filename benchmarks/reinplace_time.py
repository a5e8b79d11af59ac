"""Seconds that Inductor's reinplace pass takes, stock against patched, in one run.

    .venv/bin/python benchmarks/reinplace_time.py

Each graph is functional and one node in ten is a wait. Stock has the in-place wait there,
patched the functional one, as their functionalization leaves it. Rounds alternate, the best
of each counts. Goals: at most 1.1 times stock at 20,000 nodes, and linear growth from 2,000.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from eager_wait import PATCHED, Worker


SIZES = (2000, 20000)


def build(nodes: int):
    """A chain of segments of ten nodes: a collective, a wait, views, arithmetic, an update."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    c10d, aten = torch.ops._c10d_functional, torch.ops.aten
    wait = getattr(c10d, "_wait_tensor_functional", c10d.wait_tensor)

    def fn(x, i):
        for _ in range(nodes // 10):
            y = c10d.all_reduce(x * 2, "sum", "0")
            w = wait(y)
            left, right = w[:2], w.view(8, 2)[:4]
            z = aten.index_put(w + 1, [i], left.sum(0) + right.sum())
            x = z.view(4, 4)
        return x

    with torch._subclasses.FakeTensorMode() as mode:
        args = mode.from_tensor(torch.empty(4, 4)), mode.from_tensor(torch.zeros(1, dtype=torch.int64))
    return make_fx(fn)(*args), mode


def worker() -> None:
    """Answers each line ``NODES`` with the seconds that the pass took on a fresh copy."""
    import copy

    import torch
    import torch.distributed._functional_collectives
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    print(torch.__version__, flush=True)
    graphs = {}
    for line in sys.stdin:
        nodes = json.loads(line)
        if nodes not in graphs:
            graphs[nodes] = build(nodes)
        original, mode = graphs[nodes]
        gm = copy.copy(original)
        gm.graph = torch.fx.Graph()
        env: dict = {}
        gm.graph.output(gm.graph.graph_copy(original.graph, env))
        for old, new in env.items():
            new.meta = dict(old.meta)
        with V.set_fake_mode(mode):
            updater = FakeTensorUpdater(gm)
            start = time.perf_counter()
            reinplace_inplaceable_ops(updater, gm.graph)
            print(time.perf_counter() - start, flush=True)


def main(rounds: int) -> dict[str, dict[str, float]]:
    stock, patched = Worker(None, __file__), Worker(PATCHED, __file__)
    print(f"stock {stock.version}, patched {patched.version}: best of {rounds} rounds\n")
    print(f"{'nodes':>8}{'stock s':>10}{'patched s':>11}{'ratio':>8}")
    results = {}
    for nodes in SIZES:
        for side in (stock, patched):
            side.ask(nodes)  # builds the graph
        times = [(float(stock.ask(nodes)), float(patched.ask(nodes))) for _ in range(rounds)]
        was, now = (min(side) for side in zip(*times))
        results[str(nodes)] = {"stock_s": was, "patched_s": now}
        print(f"{nodes:>8}{was:>10.3f}{now:>11.3f}{now / was:>7.2f}x")
    small, large = (results[str(nodes)] for nodes in SIZES)
    factor = SIZES[1] / SIZES[0]
    for side in ("stock_s", "patched_s"):
        print(f"{side[:-2]}: {factor:.0f} times the nodes take {large[side] / small[side]:.1f} times as long")
    for side in (stock, patched):
        side.stop()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
    else:
        main(options.rounds)
