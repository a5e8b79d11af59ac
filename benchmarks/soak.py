"""Trains for a while on two gloo ranks, stock beside patched, and looks at what grows.

    .venv/bin/python benchmarks/soak.py [--minutes 30]

A compiled step, with the overlap and bucketing passes on, gathers its sharded parameters, reduces
its loss, and scatters the gradients in backward; every wait's result is used, so that stock is
right, too. Each rank looks after each step that no Work is left in the registry, and every few
seconds at its memory. All four processes run at once; the parameters after the same number of
steps must agree bit for bit. Fails if they do not, if a Work is left, or if memory grows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eager_wait import PATCHED, ROOT


RESULTS = ROOT / "benchmarks" / "results" / "soak.json"
RANKS = 2
SAMPLE_S = 5
DIGEST_STEPS = 100
# Of the last quarter's median over the second's: what the allocator's noise may be.
GROWTH_MIB = 8


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def worker(rank: int, store: str, minutes: float) -> None:
    """Prints one line of JSON: samples ``[s, step, MiB, Works]``, digests by step, and the steps."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, str(ROOT / "test" / "distributed"))
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from lazy_process_group import work_registry_size
    from wait_tensor_random_ways import WAYS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    torch.manual_seed(0)
    whole = [torch.randn(64, 64) / 8 for _ in range(4)]
    shards = [w.chunk(RANKS)[rank].clone().requires_grad_() for w in whole]

    def step(x, *shards):
        y = x
        for shard in shards:
            w = funcol.all_gather_tensor_autograd(shard, 0, group)
            y = torch.tanh(y @ w)
        total = funcol.all_reduce(y, "sum", group)
        return (total * total).mean()

    samples, digests, left = [], {}, 0
    way = WAYS["inductor_passes"]
    with way.context():
        compiled = way(step)
        start = last = time.monotonic()
        n, stop = 0, torch.zeros(1)
        while not stop:
            x = torch.sin(torch.arange(32 * 64.0).view(32, 64) * 0.01 + n % 97 + rank)
            compiled(x, *shards).backward()
            with torch.no_grad():
                for shard in shards:
                    shard -= 0.05 * shard.grad
                    shard.grad = None
            n += 1
            left = max(left, work_registry_size())
            if n % DIGEST_STEPS == 0:
                raw = b"".join(shard.detach().numpy().tobytes() for shard in shards)
                digests[n] = hashlib.sha256(raw).hexdigest()[:16]
                # Ranks stop at the same step.
                stop = torch.tensor([float(time.monotonic() - start > minutes * 60)])
                dist.all_reduce(stop)
            if time.monotonic() - last > SAMPLE_S:
                last = time.monotonic()
                samples.append([round(last - start, 1), n, round(rss_mib(), 2), work_registry_size()])
    print(json.dumps({"samples": samples, "digests": digests, "steps": n, "left": left}), file=answers, flush=True)
    dist.destroy_process_group()


def growth(samples: list[list[float]]) -> float:
    """MiB that the last quarter has over the second, by medians; the first one warms up."""
    memory = [mib for _, _, mib, _ in samples]
    quarter = max(1, len(memory) // 4)
    return statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter] or memory)


def main(minutes: float, path: Path) -> int:
    runs: dict[str, list[subprocess.Popen]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side, pythonpath in (("stock", None), ("patched", PATCHED)):
            env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            if pythonpath:
                env["PYTHONPATH"] = str(pythonpath)
            runs[side] = [
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", str(rank), f"{folder}/{side}", str(minutes)],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL if rank else None,
                    text=True,
                )
                for rank in range(RANKS)
            ]
        answers = {side: [p.communicate()[0] for p in processes] for side, processes in runs.items()}
    if any(p.returncode for processes in runs.values() for p in processes):
        sys.exit(f"soak.py: a rank failed: {({s: [p.returncode for p in ps] for s, ps in runs.items()})}; its message is above")
    results = {side: [json.loads(a) for a in answer] for side, answer in answers.items()}
    failures = []
    print(f"{'':<16}{'steps':>8}{'MiB first':>11}{'MiB last':>10}{'growth':>8}{'Works left':>12}")
    for side, ranks in results.items():
        for rank, r in enumerate(ranks):
            more = growth(r["samples"]) if r["samples"] else 0.0
            r["growth_mib"] = round(more, 2)
            first, last = (r["samples"][i][2] for i in (0, -1)) if r["samples"] else (0, 0)
            print(f"{f'{side} rank {rank}':<16}{r['steps']:>8}{first:>11.1f}{last:>10.1f}{more:>8.2f}{r['left']:>12}")
            if side == "patched" and r["left"]:
                failures.append(f"rank {rank} left {r['left']} Works in the registry after a step")
            if side == "patched" and more > GROWTH_MIB:
                failures.append(f"rank {rank} grew by {more:.1f} MiB")
    compared = 0
    for rank in range(RANKS):
        ours, theirs = (results[side][rank]["digests"] for side in ("patched", "stock"))
        common = sorted(ours.keys() & theirs.keys(), key=int)
        compared += len(common)
        if wrong := [n for n in common if ours[n] != theirs[n]]:
            failures.append(f"rank {rank}'s parameters differ from stock's from step {wrong[0]} on")
    if not compared:
        failures.append("too short: no step to compare with stock")
    print(f"{compared} times the parameters were compared with stock's")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"minutes": minutes, "compared": compared, "failures": failures, "sides": results}) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}")
    return len(failures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=3, metavar=("RANK", "STORE", "MINUTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(int(options.worker[0]), options.worker[1], float(options.worker[2]))
    else:
        sys.exit(bool(main(options.minutes, options.results)))
