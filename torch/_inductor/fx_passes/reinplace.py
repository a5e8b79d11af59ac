"""Every functional wait becomes the in-place wait again.

A wait changes when a tensor may be read, never what a correct program reads from
it. So, unlike the general rule, this one need not look for later uses:

- A read of the tensor's data *before* the wait, in program order, is a read of
  memory that a collective may be writing. A correct program has none, so a use of
  the unwaited tensor that now stands after the wait may read the waited value.
- Waiting in place writes nothing. It is allowed on a graph input that nothing is
  copied back to, on a saved activation and on a placeholder of a subgraph: the
  caller cannot tell.
- What must not get lost is the fresh storage that the functional wait promises,
  where somebody outside can tell. These are the values that leave the graph: a
  result, or a view of it, that would share memory with an input which is not
  reported as mutated, or with another output; and one, also as what is read after
  a copy, that would share memory with an input to which something else is copied
  at the end, since it would read that instead. There, and only there, the wait
  stays functional, and its lowering waits in place, then copies.
- Of these only the last concerns what nobody writes to: an activation saved for
  the backward, a gradient, which autograd copies unless it is the only owner, and
  what the caller gets as an alias of its input anyway.

In a functional graph the storages of the fake tensors tell exactly which values
are views of one another, and a wait in place merges two of them. So all of this
is known before anything is changed. The general rule is then told which storages
have been merged, so that no later op is reinplaced over a tensor that a wait has
made an alias of a live one. The fake tensors themselves stay as they are: the
functional wait's have the sizes, strides and offset of its argument, and to
propagate another storage through the graph takes longer than all the rest.
"""

from collections.abc import Container, Iterator

from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx._wait_tensor import wait_tensor_ops


# patch: before reinplace_inplaceable_ops
def _find_wait(node: torch.fx.Node) -> torch.fx.Node | None:
    """The call that waits, if that is all ``node`` does.

    That is ``node`` itself, or the one call in the body of a ``control_deps``: such
    a body belongs to its graph. Other subgraphs have post-grad passes of their own.
    """
    call = node
    if node.target is control_deps:
        body = getattr(node.graph.owning_module, node.args[1].target)
        call = body.graph.output_node().args[0]
    is_wait = isinstance(call, torch.fx.Node) and call.target in wait_tensor_ops()
    return call if is_wait else None


# patch: before reinplace_inplaceable_ops
def _waited_tensor(wait: torch.fx.Node) -> torch.fx.Node:
    return wait.args[2 if wait.target is control_deps else 0]


# patch: before reinplace_inplaceable_ops
def _is_waited(
    value: torch.fx.Node, tensor: torch.fx.Node, waits: Container[torch.fx.Node]
) -> bool:
    """Whether ``value`` is ``tensor`` but for having been waited for."""
    while value in waits:
        value = _waited_tensor(value)
    return value is tensor


# patch: before reinplace_inplaceable_ops
def _may_share_memory(output: torch.fx.Node) -> OrderedSet[torch.fx.Node]:
    """The values that leave the graph, but that nobody gets as a tensor to write to."""
    leaving = OrderedSet(output.all_input_nodes)
    aliases = OrderedSet(n for n in leaving if n.meta.get("aliases_input"))
    values, descs = output.args[0], output.meta.get("desc")
    if not isinstance(values, (list, tuple)) or len(values) != len(descs or ()):
        return aliases
    kinds = (
        GradAOTOutput,
        SavedForBackwardsAOTOutput,
        SavedForBackwardsNoVcCheckAOTOutput,
    )
    owned = [v for v, desc in zip(values, descs) if not isinstance(desc, kinds)]
    return aliases | (leaving - OrderedSet(owned))


# patch: before reinplace_inplaceable_ops
def _merged_storages(waits: Sequence[torch.fx.Node]) -> dict[int | None, int | None]:
    """Which storage the result of each wait ends up in when all ``waits`` are in place."""
    memory: dict[int | None, int | None] = {}
    for wait in waits:
        origin = get_node_storage(_waited_tensor(wait))
        memory[get_node_storage(wait)] = memory.get(origin, origin)
    return memory


# patch: before reinplace_inplaceable_ops
def _from_first_copy(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    node = copies[0] if copies else graph.output_node()
    while node.op != "output":
        yield node
        node = node.next


# patch: before reinplace_inplaceable_ops
def _waits_that_must_copy(
    graph: torch.fx.Graph, waits: Sequence[torch.fx.Node]
) -> OrderedSet[torch.fx.Node]:
    inputs = OrderedSet(n for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    reported = OrderedSet[int | None]()
    # When, by storage: something else is copied to it, and it is read for the last time.
    overwritten: dict[int | None, int] = {}
    last_read: dict[int | None, int] = {}
    waited = OrderedSet(waits)
    # AOTAutograd copies to inputs at the end, so this is a walk from there.
    for when, node in enumerate(_from_first_copy(graph)):
        read = node.all_input_nodes
        if node.target is aten.copy_.default and node.args[0] in inputs:
            dst, src = node.args[:2]
            reported.add(get_node_storage(dst))
            if not _is_waited(src, dst, waited):
                overwritten.setdefault(get_node_storage(dst), when)
            read = [src]
        last_read.update((get_node_storage(n), when) for n in read)

    outputs = graph.output_node().all_input_nodes
    may_share = _may_share_memory(graph.output_node())
    leaving = OrderedSet(map(get_node_storage, outputs))
    owners = (*inputs, *(n for n in outputs if n not in may_share))
    owned = OrderedSet(map(get_node_storage, owners)) - reported

    must_copy = OrderedSet[torch.fx.Node]()
    # Where each storage ends up, and the places that somebody owns.
    memory: dict[int | None, int | None] = {}
    taken = OrderedSet(owned)
    for wait in waits:
        storage = get_node_storage(wait)
        origin = get_node_storage(_waited_tensor(wait))
        home = memory.get(origin, origin)
        if home in overwritten:
            late = last_read.get(storage, -1) >= overwritten[home]
            copies = late or storage in leaving
        else:
            copies = storage in owned and home in taken
        if copies:
            must_copy.add(wait)
            home = storage
        memory[storage] = home
        if storage in owned:
            taken.add(home)
    return must_copy


# patch: before reinplace_inplaceable_ops
def reinplace_waits(
    fake_tensor_updater: torch._inductor.fx_utils.FakeTensorUpdater,
    graph: torch.fx.Graph,
) -> Callable[[torch.fx.Node], int | None]:
    """Turn the ``_wait_tensor_functional``s of ``graph`` into ``wait_tensor``s.

    Where the waited value is copied back to an input, the input itself is read from
    then on: the ops that update it in place are found by that name.

    Returns what ``get_node_storage`` would, had the fake tensors been updated.
    """
    calls = {node: call for node in graph.nodes if (call := _find_wait(node))}
    if not calls:
        return get_node_storage
    must_copy = _waits_that_must_copy(graph, list(calls))
    _log_waits(calls, must_copy)
    memory = _merged_storages([node for node in calls if node not in must_copy])

    copies: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    for copy_node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        copies[copy_node.args[0]].append(copy_node)

    for node, call in calls.items():
        if node in must_copy:
            continue
        call.target = wait_tensor_ops()[0]
        # What generated code names as its origin.
        node.meta["original_aten"] = call.meta["original_aten"] = call.target
        fake_tensor_updater.processed_hashes.add(fake_tensor_updater.hash_node(node))
        waited = _waited_tensor(node)
        if waited.op in ("placeholder", "get_attr") and waited in copies:
            # Whoever depends on the wait by name still has to.
            node.replace_all_uses_with(
                waited, lambda user: user.target is not control_deps
            )

    for dst, copy_nodes in copies.items():
        for copy_node in copy_nodes:
            if copy_node.args[1] is dst:
                copy_node.replace_all_uses_with(dst)
                graph.erase_node(copy_node)

    def storage_after_waits(node: torch.fx.Node) -> int | None:
        storage = get_node_storage(node)
        return memory.get(storage, storage)

    return storage_after_waits


# patch: before reinplace_inplaceable_ops
def _log_waits(
    calls: dict[torch.fx.Node, torch.fx.Node], must_copy: OrderedSet[torch.fx.Node]
) -> None:
    def static_bytes(node):
        val = node.meta["val"]
        return val.nbytes if isinstance(val.nbytes, int) else 0

    missed_bytes = sum(map(static_bytes, must_copy))
    log.info(
        "Reinplace for waits: candidates=%s, remain copies=%s, missed static bytes=%s.",
        len(calls),
        [node.name for node in must_copy],
        missed_bytes,
    )
    ReinplaceCounters.add_missed_opportunities(ReInplaceTrigger.WAIT, len(must_copy))
    ReinplaceCounters.add_missed_bytes(ReInplaceTrigger.WAIT, missed_bytes)
