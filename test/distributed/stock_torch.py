"""Tells the patched torch from stock, and runs Python on the stock one beside it."""

import functools
import os
import subprocess
import sys

import torch


def require_patched() -> None:
    """Raises on stock torch, where a test of the patch would prove nothing."""
    schema = str(torch.ops._c10d_functional.wait_tensor.default._schema)
    if "(a!)" not in schema:
        raise RuntimeError(
            f"This test is for the patched torch, but {torch.__file__} is stock "
            f"({schema}). Run `make test`, or `make build` and then "
            "`PYTHONPATH=build/lib .venv/bin/python -m pytest test`."
        )


@functools.cache
def stock_environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    look = "import torch; print(torch.ops._c10d_functional.wait_tensor.default._schema)"
    schema = subprocess.check_output([sys.executable, "-c", look], env=env, text=True)
    if "(a!)" in schema:
        raise RuntimeError(
            f"{sys.executable} without PYTHONPATH has no stock torch to compare with; "
            "run the tests by `make test`"
        )
    return env


def run_stock(*args: str) -> str:
    """What ``python *args`` prints on stock torch. Raises if there is none, or it fails."""
    done = subprocess.run(
        [sys.executable, *args], env=stock_environment(), capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        raise RuntimeError(f"on stock torch, {args} failed:\n{done.stderr}")
    return done.stdout
