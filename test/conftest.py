"""Refuses to run the suite on a torch that is not patched."""

import pytest
import torch


def pytest_sessionstart(session):
    schema = str(torch.ops._c10d_functional.wait_tensor.default._schema)
    if "(a!)" not in schema:
        pytest.exit(
            f"These tests are for the patched torch, but {torch.__file__} is stock "
            f"({schema}). Run `make test`, or `make build` and then "
            "`PYTHONPATH=build/lib .venv/bin/python -m pytest test`.",
            returncode=3,
        )
