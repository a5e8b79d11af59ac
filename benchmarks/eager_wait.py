"""Microseconds a call of the eager wait_tensor, stock against patched, in one run.

    make bench

Nothing is pending, so this is what the operator itself costs. The floor is
aten.lift_fresh in the patched torch, without grad: an operator that does nothing but
return its input through the same binding. No schema can make a wait cheaper than that.
Rounds alternate and the best of each counts: what slows one down slows all, or is
dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
PATCHED = ROOT / "build" / "lib"
CASES = {"without grad": False, "with grad": True}
GOALS = {"without grad": 8, "with grad": 12}


def worker() -> None:
    """Answers each line ``[OP, CASE, CALLS]`` with the seconds that so many calls took."""
    from timeit import timeit

    import torch
    import torch.distributed._functional_collectives  # the formula is stock's cost

    ops = {"wait": torch.ops._c10d_functional.wait_tensor, "floor": torch.ops.aten.lift_fresh}
    inputs = {name: torch.ones(8, requires_grad=grad) for name, grad in CASES.items()}
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, case, calls = json.loads(line)
        op, x = ops[name], inputs[case]
        print(timeit(lambda: op(x), number=calls), flush=True)


class Worker:
    """A process under one torch that answers a line of JSON with a line; ``script --worker``."""

    def __init__(self, pythonpath: Path | None, script: str = __file__):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        if pythonpath:
            env["PYTHONPATH"] = str(pythonpath)
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()

    def _answer(self) -> str:
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"a worker of {Path(sys.argv[0]).name} stopped with {self.process.wait()}; its message is above")
        return answer.strip()

    def ask(self, question) -> str:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    stock, patched = Worker(None), Worker(PATCHED)
    print(f"stock {stock.version}, patched {patched.version}: best of {rounds} rounds of {calls} calls\n")
    print(f"{'':<14}{'stock us':>10}{'patched us':>12}{'floor us':>10}{'ratio':>8}{'at most':>9}{'goal':>6}")
    results = {}
    for case in CASES:
        rows = [(stock, "wait", case), (patched, "wait", case), (patched, "floor", "without grad")]
        times = [[float(side.ask([op, on, calls])) for side, op, on in rows] for _ in range(rounds)]
        was, now, floor = (min(column) / calls * 1e6 for column in zip(*times))
        results[case] = {"stock_us": was, "patched_us": now, "floor_us": floor}
        print(
            f"{case:<14}{was:>10.2f}{now:>12.2f}{floor:>10.2f}{was / now:>7.1f}x{was / floor:>8.1f}x{GOALS[case]:>5}x"
        )
    for side in (stock, patched):
        side.stop()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
    else:
        main(options.rounds, options.calls)
