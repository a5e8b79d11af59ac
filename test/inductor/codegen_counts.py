"""Counts what Inductor generates for each program, under whatever torch runs this.

Run by stock and by patched Python; prints one JSON object:
``{program: [{"kernels": 2, "buffers": 2, ...} for each graph]}``.
"""

import json
import re
import sys
from pathlib import Path

import torch
from torch._inductor.utils import run_and_get_code


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from lazy_process_group import lazy_group
from wait_tensor_programs import PROGRAMS


COUNTED = {
    "kernels": r"\bcpp_\w+\(",
    "buffers": r"\bempty_strided\w*\(",
    "copies": r"\.copy_\(|aten\.(clone|copy|copy_)\b",
    "collectives": r"_c10d_functional\.(?!wait_tensor|_wait)\w+\.default\(",
    "waits": r"_c10d_functional\.wait_tensor\.default\(",
    "functional waits": r"_wait_tensor_functional",
}


def count(code: str) -> dict[str, int]:
    """Counts in the generated ``call``, comments included for the functional wait."""
    call = code[code.index("def call(") :]
    call = call[: call.index("\nrunner = ")]
    statements = re.sub(r"#.*", "", call)
    counts = {
        what: len(re.findall(pattern, statements)) for what, pattern in COUNTED.items()
    }
    counts["functional waits"] = len(re.findall(COUNTED["functional waits"], code))
    return counts


def count_program(name: str, group: str) -> list[dict[str, int]]:
    torch._dynamo.reset()
    program = PROGRAMS[name]

    def train():
        compiled = torch.compile(program.fn, fullgraph=True, dynamic=program.dynamic)
        result = compiled(program.make_input(0, group), group)
        if program.grad:
            result.backward()

    _, codes = run_and_get_code(train)
    return [count(code) for code in codes]


if __name__ == "__main__":
    with lazy_group(allow_pending=True) as group:
        json.dump({name: count_program(name, group) for name in PROGRAMS}, sys.stdout)
