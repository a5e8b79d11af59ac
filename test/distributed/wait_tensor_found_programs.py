"""Programs that random ones were shrunk to when they went wrong in the patched torch.

Each stays here as a regression test, under a name that says what was wrong.
"""

import torch
from wait_tensor_random_programs import Program


def _found(source: str, flying: tuple[bool, ...] = (False,), grad: bool = False) -> Program:
    return Program([], source, list(flying), grad, torch.float64, frozenset())


FOUND: dict[str, Program] = {
    # Bucketing asserted that a collective has one user. CSE had merged two equal collectives,
    # and kept the wait of each.
    "two_waits_on_a_merged_all_reduce": _found("""\
def program(x0):
    t0 = c10d.all_reduce(x0, "sum", A)
    t1 = c10d.all_reduce(x0, "sum", A)
    c10d.wait_tensor(t0)
    c10d.wait_tensor(t1)
    return [t1, x0]
"""),
    # The same, and right on stock.
    "two_waits_on_a_merged_reduce_scatter": _found("""\
def program(x0):
    t0 = c10d.all_reduce(x0, "sum", A)
    t1 = autograd_c10d.all_gather_into_tensor(x0, 2, A)
    t2 = c10d.reduce_scatter_tensor(x0, "sum", 2, B)
    t3 = c10d.reduce_scatter_tensor(x0, "sum", 2, B)
    c10d.wait_tensor(t0)
    t4 = c10d.wait_tensor(t1)
    t5 = c10d.wait_tensor(t2)
    c10d.wait_tensor(t3)
    return [t5, x0]
"""),
}
