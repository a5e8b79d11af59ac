"""Waits as AOTAutograd hands them on: ahead of clones, each view once, aliases marked."""

import operator
from typing import Any

from torch.fx._wait_tensor import is_wait_tensor

from .descriptors import PlainAOTOutput
from .schemas import OutputType


# patch: before aot_dispatch_base_graph
def tidy_waits(graph: torch.fx.Graph, fw_metadata: ViewAndMutationMeta) -> None:
    """What a freshly traced graph needs on account of its waits."""
    wait_before_cloning_inputs(graph)
    merge_views_of_waits(graph)
    mark_aliases_of_inputs(graph, fw_metadata)


# patch: before aot_dispatch_base_graph
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


# patch: before aot_dispatch_base_graph
def merge_views_of_waits(graph: torch.fx.Graph) -> None:
    """Let equal views of a waited tensor be one node.

    Functionalization replays a view of a mutated tensor at its first use, so that two
    results of one split become two splits. Nothing was written, so they are the same,
    and passes look for the one that the program had.
    """
    seen: dict[Any, torch.fx.Node] = {}
    of_waits = set()
    for node in list(graph.nodes):
        if is_wait_tensor(node):
            of_waits.add(node)
            continue
        is_view = node.target is operator.getitem or (
            isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
        )
        if not (is_view and node.args and node.args[0] in of_waits):
            continue
        key = (node.target, node.args, tuple(node.kwargs.items()))
        first = seen.setdefault(key, node)
        if first is node:
            of_waits.add(node)
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


# patch: before aot_dispatch_base_graph
def mark_aliases_of_inputs(
    graph: torch.fx.Graph, fw_metadata: ViewAndMutationMeta
) -> None:
    """Mark the outputs that the caller gets as the inputs they are, or as views of them.

    Nobody gets the tensor that the graph returns for such an output, so it need not be
    a fresh one where a wait has been put in place.
    """
    output = graph.output_node()
    for value, desc in zip(output.args[0], output.meta.get("desc", ())):
        if isinstance(desc, PlainAOTOutput) and isinstance(value, torch.fx.Node):
            if fw_metadata.output_info[desc.idx].output_type in (
                OutputType.alias_of_input,
                OutputType.is_input,
            ):
                value.meta["aliases_input"] = True
