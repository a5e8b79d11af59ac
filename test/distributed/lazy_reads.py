"""Finds operators that read a tensor which a lazy collective has not filled yet.

Poison shows that something was read too early; this says which operator read what. It
sees what goes through the dispatcher, so not what a compiled kernel does, or a body of a
`cond`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lazy_record import Entry, record
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class EarlyRead:
    """``operator`` got a tensor of ``shape`` that ``entry`` had not filled."""

    operator: str
    shape: tuple[int, ...]
    entry: Entry

    def __str__(self) -> str:
        e = self.entry
        return f"{self.operator} reads {self.shape} of {e.collective} number {e.number} of rank {e.rank} in flight"


_WAITS = ("wait_tensor", "_wait_tensor_functional")
# These look at sizes only, or wrap a tensor.
_SIZES = (
    "_wrap_tensor_autograd",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
)


def _reads(func: torch._ops.OpOverload) -> bool:
    name = func._schema.name.split("::")[1]
    if name in _WAITS or name in _SIZES:
        return False
    # A view says so in its schema: it aliases what it gets and writes nothing.
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info]
    return not aliases or any(info.is_write for info in aliases)


class _Reads(TorchDispatchMode):
    # The bodies of control flow are run outside the mode, and not seen.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[EarlyRead] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and _reads(func):
            flying = {
                t.untyped_storage()._cdata: entry
                for entry in record().pending()
                for ref in entry.outputs
                if (t := ref()) is not None
            }
            for t in tree_leaves((args, kwargs)):
                if isinstance(t, torch.Tensor) and t.numel():
                    entry = flying.get(t.untyped_storage()._cdata)
                    if entry is not None:
                        self.found.append(EarlyRead(str(func), tuple(t.shape), entry))
        return func(*args, **kwargs)


@contextlib.contextmanager
def watch_reads() -> Iterator[list[EarlyRead]]:
    """Yields the list to which early reads of this thread are added, in order."""
    with _Reads() as mode:
        yield mode.found
