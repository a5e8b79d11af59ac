"""How many random programs go wrong: stock against patched, in each way to run them, by kind.

    .venv/bin/python benchmarks/random_programs.py [--programs 10000] [--start 0] [--ways eager aot_eager]

The programs are those of test/distributed/wait_tensor_random_programs.py: each is correct, and
is compared with itself in eager mode with results that are there at once; where that fails, the
program is counted under that way and left out of the others. Everything else runs with results
that are there at the wait. A kind is what a program has; most have several, so the
numbers of kinds do not add up. Results so far are in random_programs.json after each batch, and
a run that is stopped can be taken up with ``--start``; it adds to what is there.

Inductor makes kernels with g++, which takes most of the time: about 2 s a program and core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from eager_wait import PATCHED, ROOT, Worker


RESULTS = ROOT / "benchmarks" / "results" / "random_programs.json"
BATCH = 25
REFERENCE = "eager, at once"
# Workers keep every kernel they load. Both sides share a cache, since most of their kernels are equal.
BATCHES_A_WORKER = 40


def worker() -> None:
    """Answers each line ``[FIRST, LAST, WAYS]`` with what went wrong: ``{way: {seed: message}}``."""
    # What torch prints is not an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, str(ROOT / "test" / "distributed"))
    import torch
    from wait_tensor_random_programs import program
    from wait_tensor_random_ways import batches, difference, run, Shown, WAYS

    print(torch.__version__, file=answers, flush=True)
    for line in sys.stdin:
        first, last, names = json.loads(line)
        ways = {name: WAYS[name] for name in names or WAYS}
        programs = {seed: program(seed) for seed in range(first, last)}
        seed_of = {id(p): seed for seed, p in programs.items()}
        wrong: dict[str, dict[int, str]] = {way: {} for way in (REFERENCE, *ways)}
        for batch in batches(programs.values(), BATCH):
            expected = run(batch, WAYS["eager"], Shown.AT_ONCE)
            # Autograd on stock refuses to write to what a wait returned.
            for p, e in zip(batch, expected):
                if e.error:
                    wrong[REFERENCE][seed_of[id(p)]] = e.error
            batch, expected = zip(*((p, e) for p, e in zip(batch, expected) if not e.error))
            for name, way in ways.items():
                for p, actual, e in zip(batch, run(list(batch), way), expected):
                    if message := difference(actual, e):
                        wrong[name][seed_of[id(p)]] = message
        kinds = {seed: sorted(p.kinds) for seed, p in programs.items()}
        print(json.dumps({"wrong": wrong, "kinds": kinds}), file=answers, flush=True)


class Tally:
    """Counts by side and way, and for each kind: how many have it, and how many of those are wrong."""

    def __init__(self, path: Path, start: int) -> None:
        self.path = path
        old = json.loads(path.read_text()) if start and path.exists() else {}
        self.data = old or {"first": start, "last": start, "programs": 0, "kinds": {}, "wrong": {}, "by_kind": {}, "messages": {}, "patched": {}}

    def add(self, side: str, answer: dict) -> None:
        for way, seeds in answer["wrong"].items():
            wrong = self.data["wrong"].setdefault(side, {})
            wrong[way] = wrong.get(way, 0) + len(seeds)
            by_kind = self.data["by_kind"].setdefault(side, {}).setdefault(way, {})
            messages = self.data["messages"].setdefault(side, {}).setdefault(way, {})
            for seed, message in seeds.items():
                for kind in answer["kinds"][seed] or ["none of these"]:
                    by_kind[kind] = by_kind.get(kind, 0) + 1
                short = message.split(":")[0] if "stale" in message or "Anonymous" in message else message[:60]
                short = "wrong values" if "wrong values" in message else short
                messages[short] = messages.get(short, 0) + 1
            if side == "patched":
                self.data["patched"].setdefault(way, {}).update(seeds)

    def finish(self, last: int, kinds: dict) -> None:
        count = Counter(self.data["kinds"])
        for ks in kinds.values():
            count.update(ks or ["none of these"])
        self.data["kinds"] = dict(count)
        self.data["programs"] += len(kinds)
        self.data["last"] = last
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1, sort_keys=True) + "\n")

    def show(self) -> None:
        d = self.data
        ways = list(d["wrong"]["stock"])
        print(f"\n{d['programs']} programs, wrong\n{'':<36}{'of':>7}" + "".join(f"{w:>17}" for w in ways))
        for side in ("stock", "patched"):
            print(f"{side:<36}{d['programs']:>7}" + "".join(f"{d['wrong'][side][w]:>17}" for w in ways))
        for kind, of in sorted(d["kinds"].items(), key=lambda item: -item[1]):
            row = "".join(f"{d['by_kind']['stock'][w].get(kind, 0):>17}" for w in ways)
            print(f"{'stock, ' + kind:<36}{of:>7}{row}")


def main(programs: int, start: int, ways: list[str], path: Path) -> Tally:
    tally = Tally(path, start)
    seed = start
    while seed < programs:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            sides = {"stock": Worker(None, __file__), "patched": Worker(PATCHED, __file__)}
            for _ in range(BATCHES_A_WORKER):
                last = min(seed + BATCH, programs)
                for side, process in sides.items():
                    answer = json.loads(process.ask([seed, last, ways]))
                    tally.add(side, answer)
                tally.finish(last, answer["kinds"])
                totals = {s: tuple(tally.data["wrong"][s].values()) for s in sides}
                print(f"{last:>6} programs, wrong on stock {totals['stock']}, patched {totals['patched']}", flush=True)
                seed = last
                if seed >= programs:
                    break
            for process in sides.values():
                process.stop()
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=10000, help="the number of the last one")
    parser.add_argument("--start", type=int, default=0, help="the number of the first one; adds to the results")
    parser.add_argument("--ways", nargs="*", default=[], help="all, if none is named")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
    else:
        result = main(options.programs, options.start, options.ways, options.results)
        result.show()
        sys.exit(any(result.data["wrong"]["patched"].values()))
