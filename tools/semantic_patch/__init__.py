"""Applies this repository's patch to a PyTorch tree: a wheel's copy or a source checkout.

A patch says what changes, file by file, without quoting upstream: definitions that are added or
replaced (``X.py``, ``X.cpp``) and structural rewrites (``X.yml``, ast-grep rules). See ``patch.py``.
"""

from .errors import PatchError
from .patch import Patch, Result, WHEEL_NOTE


__all__ = ["Patch", "PatchError", "Result", "WHEEL_NOTE"]
