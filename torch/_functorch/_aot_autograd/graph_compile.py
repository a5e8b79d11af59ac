"""A saved tensor that a wait makes alias an input is not the backward's to overwrite."""

from collections.abc import Sequence

from torch.fx._wait_tensor import is_wait_tensor


# patch: before collect_bw_donated_buffer_idxs
def collect_aliases_through_waits(
    graphs: Sequence[torch.fx.Graph], tensors: Sequence[FakeTensor | None]
) -> list[FakeTensor]:
    """The tensors of ``graphs`` that share memory with ``tensors`` once waits are in place.

    A functional wait's fake result has a storage of its own, which its argument's
    memory will back as soon as a compiler reinplaces the wait.
    """
    pairs = [
        (wait.meta["val"], wait.args[0].meta["val"])
        for graph in graphs
        for wait in graph.nodes
        if is_wait_tensor(wait)
    ]

    def storage(t):
        return StorageWeakRef(t.untyped_storage())

    known = {
        storage(t) for t in tensors if isinstance(t, FakeTensor) and not is_sparse_any(t)
    }
    aliases: list[FakeTensor] = []
    found = True
    while found:
        # Against the direction of a wait, too: its result may be a user's output.
        found = [t for p in pairs if not known.isdisjoint(map(storage, p)) for t in p]
        pairs = [p for p in pairs if known.isdisjoint(map(storage, p))]
        known.update(map(storage, found))
        aliases += found
    return aliases
