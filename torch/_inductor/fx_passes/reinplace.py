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
  where somebody outside can tell: its result, or a view of it, leaves the graph
  and would share storage with an input that is not reported as mutated. There,
  and only there, the wait stays functional; its lowering waits in place, then
  copies.

The in-place wait returns its argument. Both must be known to alias before any
other op is reinplaced, or one may be reinplaced over a live tensor. Hence two
steps around the update of the fake tensors that the general rule rests on too:
the wait's Meta kernel returns its input, so the update records the alias.
"""

from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx._wait_tensor import wait_tensor_ops


# patch: before reinplace_inplaceable_ops
def _waits(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Map each node of ``graph`` that does nothing but wait to the call that waits.

    That is the node itself, or the one call in the body of a ``control_deps``: such
    a body belongs to this graph. Other subgraphs have post-grad passes of their own.
    """
    waits = {}
    for node in graph.nodes:
        call = node
        if node.target is control_deps:
            body = getattr(graph.owning_module, node.args[1].target)
            call = body.graph.output_node().args[0]
        if isinstance(call, torch.fx.Node) and call.target in wait_tensor_ops():
            waits[node] = call
    return waits


# patch: before reinplace_inplaceable_ops
def reinplace_waits(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Turn each ``_wait_tensor_functional`` of ``graph`` into ``wait_tensor``.

    Returns the waits, for :func:`settle_reinplaced_waits`.
    """
    waits = _waits(graph)
    for node, call in waits.items():
        call.target = wait_tensor_ops()[0]
        # What generated code names as its origin.
        call.meta["original_aten"] = call.target
        if call is not node:
            call.meta["val"] = call.args[0].meta["val"]
    return waits


# patch: before reinplace_inplaceable_ops
def settle_reinplaced_waits(
    graph: torch.fx.Graph, waits: dict[torch.fx.Node, torch.fx.Node]
) -> bool:
    """Undo what :func:`reinplace_waits` may not have done; drop what it made idle.

    Needs fake tensors that know of the reinplaced waits. Returns whether they have
    to be updated once more, since a wait is functional again.
    """
    if not waits:
        return False

    idle_copies = []
    kept_inputs = OrderedSet(
        get_node_storage(node)
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
    )
    kept_inputs.discard(None)
    for copy_node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        dst, src = copy_node.args[:2]
        kept_inputs.discard(get_node_storage(dst))
        if (
            src in waits
            and get_node_storage(src) == get_node_storage(dst)
            and _same_tensor_metadata(src, dst)
        ):
            idle_copies.append(copy_node)

    escaped = False
    for output in graph.output_node().all_input_nodes:
        node = output
        while node not in waits and get_node_storage(node) in kept_inputs:
            node = next(
                (
                    arg
                    for arg in node.all_input_nodes
                    if get_node_storage(arg) == get_node_storage(node)
                ),
                None,
            )
            if node is None:
                break
        if node is not None and get_node_storage(node) in kept_inputs:
            waits[node].target = wait_tensor_ops()[1]
            escaped = True

    for copy_node in idle_copies:
        copy_node.replace_all_uses_with(copy_node.args[0])
        graph.erase_node(copy_node)
    return escaped
