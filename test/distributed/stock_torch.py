"""Runs Python on the stock torch that lies beside the patched one."""

import os
import subprocess
import sys


def run_stock(*args: str) -> str:
    """What ``python *args`` prints on stock torch. Raises if there is none, or it fails."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    look = "import torch; print(torch.ops._c10d_functional.wait_tensor.default._schema)"
    schema = subprocess.check_output([sys.executable, "-c", look], env=env, text=True)
    if "(a!)" in schema:
        raise RuntimeError(
            f"{sys.executable} without PYTHONPATH has no stock torch to compare with; "
            "run the tests by `make test`"
        )
    done = subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        raise RuntimeError(f"on stock torch, {args} failed:\n{done.stderr}")
    return done.stdout
