"""Refuses to run the suite on a torch that is not patched."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent / "distributed"))
from stock_torch import require_patched


def pytest_sessionstart(session):
    try:
        require_patched()
    except RuntimeError as e:
        pytest.exit(str(e), returncode=3)
