"""Questions that stock torch and the patched one must answer alike.

A question is a function whose result, or whose exception, is written down as text.
Both sides run the same file: the patched one in the test's own process, stock in one
subprocess for all questions, since it is the import of torch that costs.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from stock_torch import run_stock
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


Question = Callable[[], Any]


class Table(dict[str, Question]):
    """``@table`` enters a function under its own name."""

    def __call__(self, fn: Question) -> Question:
        if fn.__name__ in self:
            raise ValueError(f"the table has a question {fn.__name__} already")
        self[fn.__name__] = fn
        return fn


def describe(value: Any) -> Any:
    """``value`` as what JSON can hold: a tensor is its type, dtype, geometry, whether it requires grad, and its values.

    A pending result is waited for only after its type was taken.
    """
    if isinstance(value, Tensor):
        kind = type(value).__name__
        waited = value.wait() if isinstance(value, AsyncCollectiveTensor) else value
        grad = ", requires_grad" if value.requires_grad else ""
        values = waited.detach().tolist() if type(waited) in (Tensor, torch.nn.Parameter) else str(waited.detach())
        return f"{kind} {value.dtype} {list(value.shape)} {list(value.stride())}{grad}: {values}"
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [describe(v) for v in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def _text(error: Exception) -> str:
    """An exception without what differs between two runs of one torch: paths, lines, addresses."""
    lines = str(error).strip().splitlines()[:1]
    text = f"{type(error).__name__}: {' '.join(lines)}"
    return re.sub(r"0x[0-9a-f]+", "0x…", re.sub(r"\S*/torch/", "torch/", text))


def answer(question: Question) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return json.loads(json.dumps(describe(question())))
        except Exception as e:
            return _text(e)


def answer_all(questions: Mapping[str, Question]) -> dict[str, Any]:
    return {name: answer(question) for name, question in questions.items()}


def print_answers(questions: Mapping[str, Question]) -> None:
    """What a test file does when it is run with ``--answers``."""
    print("\n" + json.dumps(answer_all(questions)))


def ask_stock(file: str, *args: str) -> dict[str, Any]:
    """The answers of ``file``'s questions on stock torch."""
    return json.loads(run_stock(file, "--answers", *args).splitlines()[-1])
