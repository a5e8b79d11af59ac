"""A wait for a cloned graph input waits for the input."""

from torch.fx._wait_tensor import is_wait_tensor


# patch: before aot_dispatch_autograd_graph
def wait_before_cloning_inputs(graph: torch.fx.Graph) -> None:
    """Turn a wait on a clone of a graph input into a clone of the waited input.

    AOTAutograd clones an input that requires grad and that the program also mutates
    in a way autograd can see. A wait in that program is then traced on the clone,
    which was read while in flight and for which no Work is registered. Waiting
    earlier than written is always correct.
    """
    for wait in list(graph.nodes):
        if not is_wait_tensor(wait):
            continue
        clone = wait.args[0]
        if (
            clone.target is torch.ops.aten.clone.default
            and clone.args[0].op == "placeholder"
        ):
            with graph.inserting_before(clone):
                waited = graph.node_copy(wait, lambda _: clone.args[0])
            clone.update_arg(0, waited)
            wait.replace_all_uses_with(clone)
            graph.erase_node(wait)
