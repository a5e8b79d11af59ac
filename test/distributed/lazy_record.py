"""The book in which lazy groups write what was issued, and who waited for it."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch._C._distributed_c10d import _get_work_registry_size


@dataclass(eq=False)
class Entry:
    """One collective that one rank issued.

    ``waiters`` are the names of the threads that waited, in order, one for each time.
    ``overwritten`` says which of its tensors somebody wrote to while it was in flight:
    "output", or "input". Neither may be touched then.
    """

    number: int
    collective: str
    group: str
    rank: int
    done: bool = False
    waiters: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    outputs: list[weakref.ref] = field(default_factory=list, repr=False)
    # Lets another Work's wait complete this one. Weak: whoever dropped a Work dropped it.
    finish: Callable[[], Callable[[timedelta], None] | None] = field(
        default=lambda: None, repr=False
    )


class Record:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entries: list[Entry] = []
        self.waited = 0
        self.registered = _get_work_registry_size()

    def enter(self, collective: str, group: str, rank: int, outputs: list[torch.Tensor]) -> Entry:
        refs = [weakref.ref(t) for t in outputs]
        with self.lock:
            entry = Entry(len(self.entries), collective, group, rank, outputs=refs)
            self.entries.append(entry)
        return entry

    def complete(self, entry: Entry) -> None:
        with self.lock:
            if not entry.done:
                entry.done = True
                entry.outputs.clear()
                self.waited += 1

    def pending(self) -> list[Entry]:
        with self.lock:
            return [e for e in self.entries if not e.done]


_record = Record()


def record() -> Record:
    """What was issued since the last reset, by every lazy group of this process."""
    return _record


def issued() -> int:
    """Works issued since the last reset, by every lazy group of this process."""
    return len(_record.entries)


def waited() -> int:
    """How many of those are complete; waiting twice counts once."""
    return _record.waited


def pending() -> int:
    """How many of those are not, including the ones nobody can reach any more."""
    return len(_record.pending())


def overwritten() -> list[Entry]:
    """The completed ones of which an output or an input was written to in flight."""
    with _record.lock:
        return [e for e in _record.entries if e.overwritten]


def reset() -> None:
    """Count from zero. Works issued earlier still complete, but are not counted."""
    # Each Work keeps the record it was entered in, so a late wait cannot make the
    # new counts negative.
    global _record
    _record = Record()
