"""A process group whose results do not exist until they are waited for.

A collective returns before its output is written, so a program that reads the
output before the wait has a race. With a fast backend the output is nearly
always there in time, and a test that only compares values passes. Importing this
module registers the backend "lazy", which takes luck out of it: a collective
computes its result at once, but into a hidden buffer, and fills the tensor the
caller sees with a poison. Only ``Work.wait()`` copies the result over the poison.

That turns an order into a value. Nothing but the wait writes the result, so a
read that sees the result came after the wait, and a read that came before it
sees the poison, on every run and every machine. For floating and complex types
the poison is NaN, which arithmetic carries through to the end of the program.
For integers it is the extreme that is not zero, for bool it is True. Those can
be right answers too: choose inputs for which they are not.

A collective's input is read when the collective is issued. What happens to it
between then and the wait is not observed, so this finds early reads of an output,
not early writes to an input. A second collective on an output that nobody waited
for counts as an early read, also where a real backend would have queued the two.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _allow_inflight_collective_as_graph_input,
    _get_work_registry_size,
    _register_work,
    AllgatherOptions,
    PythonCallbackWork,
)


__all__ = [
    "is_poison",
    "issued",
    "lazy_group",
    "LazyProcessGroup",
    "pending",
    "poison",
    "reset",
    "waited",
    "work_registry_size",
]


def poison(dtype: torch.dtype) -> complex | float | int | bool:
    """What an output of this dtype holds until its Work is waited for."""
    if dtype.is_floating_point:
        return float("nan")
    if dtype.is_complex:
        # Both parts, as when the functional ops pass a complex tensor's real view.
        return complex("nan+nanj")
    if dtype is torch.bool:
        return True
    info = torch.iinfo(dtype)
    # The minimum of an unsigned type is too likely a right answer.
    return info.min or info.max


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether every element of ``tensor`` is the poison; so it is if there is none."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        # Narrow float types have no isnan of their own.
        return bool(tensor.float().isnan().all())
    return bool((tensor == poison(tensor.dtype)).all())


class _Ledger:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.issued = 0
        self.waited = 0


_ledger = _Ledger()


def issued() -> int:
    """Works issued since the last reset, by every lazy group of this process."""
    return _ledger.issued


def waited() -> int:
    """How many of those were waited for; waiting twice counts once."""
    return _ledger.waited


def pending() -> int:
    """How many of those were not, including the ones nobody can reach any more."""
    ledger = _ledger
    with ledger.lock:
        return ledger.issued - ledger.waited


def reset() -> None:
    """Count from zero. Works issued earlier still complete, but are not counted."""
    # Each Work keeps the ledger it was entered in, so a late wait cannot make the
    # new counts negative.
    global _ledger
    _ledger = _Ledger()


def work_registry_size() -> int:
    """Works that c10d holds on behalf of tensors not yet passed to wait_tensor.

    A Work is held once for each of its outputs' storages.
    """
    return _get_work_registry_size()


def _lazy_work(
    results: list[tuple[torch.Tensor, torch.Tensor]],
    transfer: dist.Work | None = None,
) -> dist.Work:
    """Poison the first tensor of each pair; the Work's wait copies the second there.

    ``transfer`` is what has to finish before the second ones are final.
    """
    ledger = _ledger
    lock = threading.Lock()
    done = False

    def finish(timeout: timedelta) -> bool:
        nonlocal done, transfer
        with lock:
            if done:
                return True
            if transfer is not None:
                transfer.wait(timeout)
            for visible, result in results:
                visible.data.copy_(result)
            done = True
            # Whoever still holds the Work should not hold the tensors too.
            results.clear()
            transfer = None
        with ledger.lock:
            ledger.waited += 1
        return True

    # This write and the one at the wait go through `.data`, since autograd does not see
    # what a backend writes. Else the wait would bump the version of a tensor already
    # saved for backward, and backward would raise where it should read.
    for visible, _ in results:
        visible.data.fill_(poison(visible.dtype))
    with ledger.lock:
        ledger.issued += 1

    # c10d's registry holds a C++ Work. This one owns its callback, whereas an
    # instance of a Python subclass of Work would lose its `wait` as soon as the
    # Python half was collected.
    work = PythonCallbackWork(finish)
    if _allow_inflight_collective_as_graph_input():
        # c10d does this in the method that a Python group overrides.
        for visible, _ in results:
            _register_work(visible, work)
    return work


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.clone(memory_format=torch.contiguous_format)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.data, memory_format=torch.contiguous_format)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # Gloo refuses dtypes that it cannot add up, also where it would only move them.
    # The first dimension stays, since all_to_all splits it.
    return torch.atleast_1d(tensor).unsqueeze(-1).flatten(1).view(torch.uint8)


class LazyProcessGroup(dist.ProcessGroup):
    """Gloo computes, `_lazy_work` withholds.

    The group has no c10d backend on purpose: a collective that is not implemented
    here then fails, where with one it would silently complete early.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, world_size)
        self._gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("lazy", store), rank, world_size, timeout
        )
        self._name = ""
        self._desc = ""

    def getBackendName(self) -> str:
        return "lazy"

    # The base class keeps the name in its backends.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _reduced(self, tensor: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        result = _snapshot(tensor)
        average = op == dist.ReduceOp.AVG
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.SUM if average else op
        self._gloo.allreduce([result], opts).wait()
        if average:
            exact = result.is_floating_point() or result.is_complex()
            result.div_(self.size(), rounding_mode=None if exact else "trunc")
        return result

    def _gathered(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        result = _buffer(output)
        sent = _raw(_snapshot(input)).flatten()
        self._gloo._allgather_base(_raw(result).flatten(), sent).wait()
        return result

    def _scattered(
        self, output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp
    ) -> torch.Tensor:
        chunks = self._reduced(input, op).reshape(self.size(), -1)
        return chunks[self.rank()].reshape(output.shape)

    def allreduce(
        self,
        tensors: list[torch.Tensor],
        opts: dist.AllreduceOptions = dist.AllreduceOptions(),
    ) -> dist.Work:
        return _lazy_work([(t, self._reduced(t, opts.reduceOp)) for t in tensors])

    allreduce_coalesced = allreduce

    def broadcast(
        self,
        tensors: list[torch.Tensor],
        opts: dist.BroadcastOptions = dist.BroadcastOptions(),
    ) -> dist.Work:
        results = [(t, _snapshot(t)) for t in tensors]
        for _, result in results:
            self._gloo.broadcast([_raw(result)], opts).wait()
        return _lazy_work(results)

    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _lazy_work([(o, self._gathered(o, i)) for o, i in pairs])

    def allgather(
        self,
        output_lists: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> dist.Work:
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        for outputs, input in zip(output_lists, inputs, strict=True):
            whole = input.new_empty((len(outputs), *input.shape))
            results += zip(outputs, self._gathered(whole, input), strict=True)
        return _lazy_work(results)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: dist.ReduceScatterOptions = dist.ReduceScatterOptions(),
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: dist.ReduceScatterOptions = dist.ReduceScatterOptions(),
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _lazy_work([(o, self._scattered(o, i, opts.reduceOp)) for o, i in pairs])

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        input_lists: list[list[torch.Tensor]],
        opts: dist.ReduceScatterOptions = dist.ReduceScatterOptions(),
    ) -> dist.Work:
        inputs = [torch.stack(list(tensors)) for tensors in input_lists]
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: dist.AllToAllOptions | None = None,
    ) -> dist.Work:
        result = _buffer(output)
        self._gloo.alltoall_base(
            _raw(result), _raw(_snapshot(input)), output_splits, input_splits
        ).wait()
        return _lazy_work([(output, result)])

    # These return before their peers arrive, and may have to: two ranks that each send
    # first and receive next would otherwise wait for each other. So it is at the wait
    # that gloo finishes them.
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        return _lazy_work(
            [], self._gloo.send([_raw(_snapshot(t)) for t in tensors], dst, tag)
        )

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        results = [(t, _buffer(t)) for t in tensors]
        received = [_raw(result) for _, result in results]
        return _lazy_work(results, self._gloo.recv(received, src, tag))

    def barrier(self, opts: dist.BarrierOptions = dist.BarrierOptions()) -> dist.Work:
        return _lazy_work([], self._gloo.barrier(opts))

    # The older names, which callers in Python still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


# c10d lets a Python group override every collective that the functional ops use
# but one: all_gather_single always calls this op, and the op wants a backend.
def _allgather_base_(
    output: torch.Tensor,
    input: torch.Tensor,
    boxed_group: torch.ScriptObject,
    async_op: bool = True,
    timeout: int = -1,
) -> tuple[torch.Tensor, torch.ScriptObject]:
    group = dist.ProcessGroup.unbox(boxed_group)
    if not isinstance(group, LazyProcessGroup):
        group = group._get_backend(output.device)
    opts = AllgatherOptions()
    opts.asyncOp = async_op
    opts.timeout = timedelta(milliseconds=timeout)
    return output, group._allgather_base(output, input, opts).boxed()


_c10d = torch.library.Library("c10d", "IMPL")  # noqa: TOR901
with warnings.catch_warnings():
    # It is the override that is meant here.
    warnings.filterwarnings("ignore", "Warning only once for all operators")
    _c10d.impl("_allgather_base_", _allgather_base_, "CPU", allow_override=True)

dist.Backend.register_backend("lazy", LazyProcessGroup, devices=["cpu"])


@contextlib.contextmanager
def lazy_group(
    world_size: int = 1,
    rank: int = 0,
    store: dist.Store | None = None,
    *,
    allow_pending: bool = False,
) -> Iterator[str]:
    """Make a lazy group the default group, and yield its name to the functional ops.

    Counting starts from zero. A Work left pending at the end is an error unless
    ``allow_pending``. More than one rank needs a store that the ranks share.
    """
    if store is None:
        if world_size != 1:
            raise ValueError("a group of several ranks needs a store they share")
        store = dist.HashStore()
    reset()
    dist.init_process_group("lazy", store=store, rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD.group_name
        if not allow_pending and pending():
            raise AssertionError(
                f"{pending()} of {issued()} collectives were never waited for"
            )
    finally:
        dist.destroy_process_group()
