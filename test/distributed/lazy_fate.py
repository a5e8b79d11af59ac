"""What may become of a collective instead of finishing when it is waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from lazy_record import Entry


class Shown(Enum):
    """When a collective's outputs hold its result."""

    AT_WAIT = "at the wait"
    # Wrong programs are right then: the reference, with which others are compared.
    AT_ONCE = "at once"


@dataclass(frozen=True)
class Fate:
    """A wait takes ``delay`` seconds, then raises ``error``, or the result is there.

    With ``never`` the wait ends only by the group's timeout, or when the group is aborted.
    """

    delay: float = 0.0
    error: Exception | None = None
    never: bool = False


@dataclass(frozen=True)
class Script:
    """``fate`` of each collective, and which ones finish whenever any is waited for.

    ``order`` gets the pending entries of the process, the awaited one among them, and returns
    those that finish then, in that order. The awaited one finishes last, if it is not there.
    """

    shown: Shown = Shown.AT_WAIT
    fate: Callable[[Entry], Fate] | None = None
    order: Callable[[list[Entry]], Sequence[Entry]] | None = None
