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

A collective's input is read when the collective is issued. What is written to it, or to
an output, between then and the wait is found at the wait (`overwritten`), where memory that
was freed too early and used again shows too. A second collective on an output that nobody waited
for counts as an early read, also where a real backend would have queued the two.
"""

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _allow_inflight_collective_as_graph_input,
    _get_work_registry_size,
    _register_work,
    AllgatherOptions,
    PythonCallbackWork,
)
from torch.utils._python_dispatch import _disable_current_modes


sys.path.insert(0, str(Path(__file__).parent))
from lazy_fate import Fate, Script, Shown
from lazy_peers import GlooPeers, raw, SimulatedPeers
from lazy_record import Entry, issued, overwritten, pending, record, reset, waited


__all__ = [
    "Fate",
    "is_poison",
    "issued",
    "lazy_group",
    "LazyProcessGroup",
    "overwritten",
    "pending",
    "poison",
    "record",
    "reset",
    "Script",
    "Shown",
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


def work_registry_size() -> int:
    """Works since the last reset that c10d holds for tensors not yet passed to wait_tensor.

    A Work is held once for each of its outputs' storages, and for good once they are freed.
    """
    return _get_work_registry_size() - record().registered


class _LazyWork:
    """Poisons what the caller sees of a collective, and gives it out when it is waited for."""

    def __init__(
        self,
        entry: Entry,
        group: "LazyProcessGroup",
        results: list[tuple[torch.Tensor, torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        transfer: dist.Work | None,
    ) -> None:
        self.entry = entry
        self.record = record()
        self.script = group.script
        self.aborted = group.aborted
        self.timeout = group.timeout
        self.results = results
        # A real backend, too, keeps its inputs until it has read them, and expects them unchanged.
        written = {t.untyped_storage().data_ptr() for t, _ in results}
        self.inputs = [
            (t.data, _snapshot(t))
            for t in inputs
            if t.untyped_storage().data_ptr() not in written
        ]
        self.transfer = transfer
        self.lock = threading.RLock()
        # These writes go through `.data`, since autograd does not see what a backend writes.
        # Else the wait would bump the version of a tensor already saved for backward, and
        # backward would raise where it should read.
        at_once = self.script.shown is Shown.AT_ONCE
        for visible, result in results:
            visible.data.copy_(result) if at_once else visible.data.fill_(poison(visible.dtype))
        if at_once:
            self.results = []

    def wait(self, timeout: timedelta) -> bool:
        self.entry.waiters.append(threading.current_thread().name)
        if not self.entry.done and self.script.order is not None:
            for entry in self.script.order(self.record.pending()):
                if finish := entry.finish():
                    finish(timeout)
        with _disable_current_modes():
            self.finish(timeout)
        return True

    def finish(self, timeout: timedelta) -> None:
        with self.lock:
            if self.entry.done:
                return
            self.meet_fate(timeout)
            if self.transfer is not None:
                self.transfer.wait(timeout)
            if any(_bytes_differ(t, was) for t, was in self.inputs):
                self.entry.overwritten.append("input")
            if not all(is_poison(visible) for visible, _ in self.results):
                self.entry.overwritten.append("output")
            for visible, result in self.results:
                visible.data.copy_(result)
            self.record.complete(self.entry)
            # Whoever still holds the Work should not hold the tensors too.
            self.results, self.inputs, self.transfer = [], [], None

    def meet_fate(self, timeout: timedelta) -> None:
        fate = self.script.fate(self.entry) if self.script.fate else Fate()
        what = f"{self.entry.collective} number {self.entry.number} of group {self.entry.group}"
        # c10d waits with a timeout of zero where it means the group's.
        limit = (timeout or self.timeout).total_seconds()
        if self.aborted.wait(limit if fate.never else min(fate.delay, limit)):
            raise RuntimeError(f"{what} was aborted")
        if fate.never or fate.delay > limit:
            raise RuntimeError(f"{what} timed out after {limit} s")
        if fate.error is not None:
            raise fate.error


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.clone(memory_format=torch.contiguous_format)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.data, memory_format=torch.contiguous_format)


def _bytes_differ(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    # NaN differs from itself, its bytes do not.
    return not torch.equal(raw(_snapshot(tensor)), raw(other))


class LazyProcessGroup(dist.ProcessGroup):
    """The peers compute, `_LazyWork` withholds.

    The group has no c10d backend on purpose: a collective that is not implemented
    here then fails, where with one it would silently complete early.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        peers: SimulatedPeers | None = None,
    ) -> None:
        super().__init__(rank, world_size)
        self.peers = peers or GlooPeers(store, rank, world_size, timeout)
        self.timeout = timeout
        self.script = Script()
        self.aborted = threading.Event()
        self._name = ""
        self._desc = ""

    def work(
        self,
        collective: str,
        results: list[tuple[torch.Tensor, torch.Tensor]],
        inputs: Sequence[torch.Tensor] = (),
        transfer: dist.Work | None = None,
    ) -> dist.Work:
        """Poison the first tensor of each pair; the Work's wait copies the second there.

        ``transfer`` is what has to finish before the second ones are final.
        """
        visible = [t for t, _ in results]
        entry = record().enter(collective, self._name, self.rank(), visible)
        # What the backend does itself is no read too early.
        with _disable_current_modes():
            lazy = _LazyWork(entry, self, results, inputs, transfer)
        entry.finish = weakref.WeakMethod(lazy.finish)
        # c10d's registry holds a C++ Work. This one owns its callback, whereas an
        # instance of a Python subclass of Work would lose its `wait` as soon as the
        # Python half was collected.
        work = PythonCallbackWork(lazy.wait)
        if _allow_inflight_collective_as_graph_input():
            # c10d does this in the method that a Python group overrides.
            for t in visible:
                _register_work(t, work)
        return work

    def abort(self) -> None:
        """Every wait that has not ended, or not begun, raises."""
        self.aborted.set()

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
        self.peers.reduce(result, dist.ReduceOp.SUM if average else op)
        if average:
            exact = result.is_floating_point() or result.is_complex()
            result.div_(self.size(), rounding_mode=None if exact else "trunc")
        return result

    def _gathered(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        result = _buffer(output)
        self.peers.gather(result, _snapshot(input))
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
        results = [(t, self._reduced(t, opts.reduceOp)) for t in tensors]
        return self.work("allreduce", results)

    allreduce_coalesced = allreduce

    def broadcast(
        self,
        tensors: list[torch.Tensor],
        opts: dist.BroadcastOptions = dist.BroadcastOptions(),
    ) -> dist.Work:
        results = [(t, _snapshot(t)) for t in tensors]
        for _, result in results:
            self.peers.broadcast(result, opts)
        return self.work("broadcast", results)

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
        results = [(o, self._gathered(o, i)) for o, i in pairs]
        return self.work("allgather", results, inputs)

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
        return self.work("allgather", results, inputs)

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
        results = [(o, self._scattered(o, i, opts.reduceOp)) for o, i in pairs]
        return self.work("reduce_scatter", results, inputs)

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
        self.peers.exchange(result, _snapshot(input), output_splits, input_splits)
        return self.work("alltoall", [(output, result)], [input])

    # These return before their peers arrive, and may have to: two ranks that each send
    # first and receive next would otherwise wait for each other. So it is at the wait
    # that the peers finish them.
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        sent = self.peers.send([_snapshot(t) for t in tensors], dst, tag)
        return self.work("send", [], tensors, sent)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        results = [(t, _buffer(t)) for t in tensors]
        received = self.peers.recv([result for _, result in results], src, tag)
        return self.work("recv", results, transfer=received)

    def barrier(self, opts: dist.BarrierOptions = dist.BarrierOptions()) -> dist.Work:
        return self.work("barrier", [], transfer=self.peers.barrier(opts))

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

def _simulated(options, _) -> LazyProcessGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return LazyProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        SimulatedPeers(ranks),
    )


dist.Backend.register_backend("lazy", LazyProcessGroup, devices=["cpu"])
dist.Backend.register_backend(
    "simulated", _simulated, extended_api=True, devices=["cpu"]
)


@contextlib.contextmanager
def lazy_group(
    world_size: int = 1,
    rank: int = 0,
    store: dist.Store | None = None,
    *,
    allow_pending: bool = False,
    simulated: bool = False,
    timeout: timedelta = timedelta(minutes=5),
    script: Script | None = None,
) -> Iterator[str]:
    """Make a lazy group the default group, and yield its name to the functional ops.

    Counting starts from zero. A Work left pending at the end is an error unless
    ``allow_pending``. More than one rank needs a store that the ranks share, unless the
    other ranks are ``simulated``.
    """
    if store is None:
        if world_size != 1 and not simulated:
            raise ValueError("a group of several ranks needs a store they share")
        store = dist.HashStore()
    reset()
    backend = "simulated" if simulated else "lazy"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    try:
        dist.group.WORLD.script = script or Script()
        yield dist.group.WORLD.group_name
        if not allow_pending and pending():
            raise AssertionError(
                f"{pending()} of {issued()} collectives were never waited for"
            )
    finally:
        dist.destroy_process_group()
