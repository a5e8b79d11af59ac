"""Where a lazy group's results come from: other ranks, or ranks that are made up.

A rank's part in a collective is computed when it is issued, by one of these. Both know
sizes and values only; when a result may be seen is the lazy group's business.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, with its first dimension, since all_to_all splits that."""
    # Gloo refuses dtypes that it cannot add up, also where it would only move them.
    return torch.atleast_1d(tensor).unsqueeze(-1).flatten(1).view(torch.uint8)


class GlooPeers:
    """The other ranks, in processes or threads that share the store."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        self.gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("lazy", store), rank, world_size, timeout
        )

    def reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
        opts = dist.AllreduceOptions()
        opts.reduceOp = op
        self.gloo.allreduce([tensor], opts).wait()

    def gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.gloo._allgather_base(raw(output).flatten(), raw(input).flatten()).wait()

    def broadcast(self, tensor: torch.Tensor, opts: dist.BroadcastOptions) -> None:
        self.gloo.broadcast([raw(tensor)], opts).wait()

    def exchange(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> None:
        self.gloo.alltoall_base(
            raw(output), raw(input), output_splits, input_splits
        ).wait()

    # What follows may not block, so it is a Work that the wait finishes.
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        return self.gloo.send([raw(t) for t in tensors], dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        return self.gloo.recv([raw(t) for t in tensors], src, tag)

    def barrier(self, opts: dist.BarrierOptions) -> dist.Work:
        return self.gloo.barrier(opts)


class SimulatedPeers:
    """Ranks that do not exist: what global rank r puts in is ``1 + r`` times what we do.

    We are rank 0. So each collective changes what it is given, and groups of different
    ranks change it differently: a read of the wrong buffer is a wrong value.
    """

    def __init__(self, ranks: list[int]) -> None:
        if not ranks or ranks[0] != 0:
            raise ValueError(f"a simulated group needs this process, rank 0, first: {ranks}")
        self.factors = [1 + rank for rank in ranks]

    def _inputs(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([(tensor * f).to(tensor.dtype) for f in self.factors])

    def reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
        inputs = self._inputs(tensor)
        if op == dist.ReduceOp.SUM:
            tensor.copy_(inputs.sum(0))
        elif op == dist.ReduceOp.PRODUCT:
            tensor.copy_(inputs.prod(0))
        elif op == dist.ReduceOp.MAX:
            tensor.copy_(inputs.amax(0))
        elif op == dist.ReduceOp.MIN:
            tensor.copy_(inputs.amin(0))
        else:
            raise NotImplementedError(f"a simulated group cannot reduce by {op}")

    def gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.view(-1).copy_(self._inputs(input).view(-1))

    def broadcast(self, tensor: torch.Tensor, opts: dist.BroadcastOptions) -> None:
        tensor.copy_(self._inputs(tensor)[opts.rootRank])

    def exchange(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> None:
        rows = input_splits[0] if input_splits else len(input) // len(self.factors)
        if output_splits and set(output_splits) != {rows}:
            raise NotImplementedError("simulated ranks send as many rows as this one does")
        output.copy_(self._inputs(input[:rows]).flatten(0, 1))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        raise NotImplementedError("simulated ranks do not send or receive")

    recv = send

    def barrier(self, opts: dist.BarrierOptions) -> None:
        return None
