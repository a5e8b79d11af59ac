"""Loads the library that gives a stock libtorch the new schema of wait_tensor.

Only in a torch patched from a wheel; a source build holds the schema itself.
The library is named after the commit of the torch it was compiled against: its
code reaches into the dispatcher, so any other torch must not load it.
"""

import ctypes
import os

from torch.version import __version__, git_version


_NAME = f"libtorch_wait_tensor-{(git_version or 'unknown')[:12]}.so"


def _load() -> ctypes.CDLL:
    lib = os.path.join(os.path.dirname(__file__), "lib")
    path = os.path.join(lib, _NAME)
    advice = (
        "Build the patched torch again for this release (`make build`, or "
        "`pip wheel --no-build-isolation --no-deps .` in the patch's repository), "
        "or reinstall stock torch to remove the patch."
    )
    if not os.path.exists(path):
        others = sorted(
            name for name in os.listdir(lib) if name.startswith("libtorch_wait_tensor")
        )
        found = f"only {', '.join(others)}, made for another torch" if others else "none"
        raise ImportError(
            f"This torch {__version__} in {os.path.dirname(__file__)} is patched for "
            f"_c10d_functional.wait_tensor, which needs lib/{_NAME}; {found} is there. "
            + advice
        )
    try:
        return ctypes.CDLL(path)
    except OSError as e:
        raise ImportError(
            f"{path} cannot be loaded into torch {__version__}: {e}. {advice}"
        ) from e


library = _load()
