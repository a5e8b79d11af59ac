# Owner(s): ["oncall: distributed"]

"""Faults around a wait end as they do on stock: one error, in time, and nothing left behind.

``OUTCOMES`` says for each fault of wait_tensor_faults.py how it ends, and how many Works c10d's
registry then holds. Stock is asked, too, so that a line here is about both.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parent))
from stock_torch import require_patched, run_stock
from wait_tensor_faults import FAULTS, WAYS


OUTCOMES = {
    "work_fails": "RuntimeError: link down; 0 left",
    "never_finishes": "RuntimeError: timed out; 0 left",
    "aborted_in_a_wait": "RuntimeError: aborted; 0 left",
    "interrupted_in_a_wait": "KeyboardInterrupt: ; 0 left, then right; 0 left",
    "group_destroyed_with_a_wait_pending": "right; 0 left",
    # The Work waits for whoever catches the exception to wait for it.
    "exception_between_issue_and_wait": "ValueError: between; 1 left, then right; 0 left",
    "waited_in_another_thread": "right; 0 left",
    # Upstream's: a second thread does not wait for what a first one is waiting for.
    "two_threads_wait_for_one_tensor": "poison; 0 left, then right; 0 left",
    # Nobody can wait for it any more. Its Work stays, as on stock.
    "freed_in_flight": "1 while in flight, then right; 1 left",
    "no_memory_for_the_functional_wait": "RuntimeError: can't allocate; 0 left, then right; 0 left",
    "gloo_rank_dies_before_the_wait": "RuntimeError: closed by peer; 0 left",
    "gloo_rank_dies_during_the_wait": "RuntimeError: closed by peer; 0 left",
    "gloo_rank_never_joins": "RuntimeError: timed out; 0 left",
    "gloo_rank_destroys_its_group": "RuntimeError: closed by peer; 0 left",
}
STOCK = {
    # It has no such op, so it is the tensor itself that is waited for afterwards.
    "no_memory_for_the_functional_wait": "AttributeError: wait_tensor_functional; 1 left, then right; 0 left",
}
_SCRIPT = str(Path(__file__).parent / "wait_tensor_faults.py")


class TestFaults(TestCase):
    @parametrize("name", FAULTS)
    def test_fault(self, name):
        self.assertEqual(patched()[name], dict.fromkeys(WAYS, OUTCOMES[name]))

    @parametrize("name", FAULTS)
    def test_fault_on_stock(self, name):
        outcome = STOCK.get(name, OUTCOMES[name])
        self.assertEqual(stock()[name], dict.fromkeys(WAYS, outcome))


@functools.cache
def patched() -> dict[str, dict[str, str]]:
    # This process has too many threads to be forked.
    return json.loads(subprocess.check_output([sys.executable, _SCRIPT], text=True, stderr=subprocess.DEVNULL))


@functools.cache
def stock() -> dict[str, dict[str, str]]:
    return json.loads(run_stock(_SCRIPT))


instantiate_parametrized_tests(TestFaults)

if __name__ == "__main__":
    require_patched()
    run_tests()
