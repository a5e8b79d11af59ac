"""Counts what Inductor generates for each program, under whatever torch runs this.

Run by stock and by patched Python; prints one JSON object:
``{program: [{"kernels": 2, "buffers": 2, ...} for each graph]}``. What is counted, and
how, stands in ``benchmarks/ab_codegen.py``.
"""

import json
import sys
from pathlib import Path

import torch
from torch._inductor.utils import run_and_get_code


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ab_codegen import counts
from lazy_process_group import lazy_group
from wait_tensor_programs import PROGRAMS


def count_program(name: str, group: str) -> list[dict[str, int]]:
    torch._dynamo.reset()
    program = PROGRAMS[name]

    def train():
        compiled = torch.compile(program.fn, fullgraph=True, dynamic=program.dynamic)
        result = compiled(program.make_input(0, group), group)
        if program.grad:
            result.backward()

    _, codes = run_and_get_code(train)
    return [counts(code) for code in codes]


if __name__ == "__main__":
    with lazy_group(allow_pending=True) as group:
        json.dump({name: count_program(name, group) for name in PROGRAMS}, sys.stdout)
