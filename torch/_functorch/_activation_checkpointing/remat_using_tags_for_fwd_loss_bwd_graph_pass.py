"""Rematerialization drops the collectives it made dead, not the waits that were."""

from collections.abc import Callable

from torch.fx._wait_tensor import is_wait_tensor


# patch: after is_impure_node_for_dce
def is_impure_node_for_dce_of(
    gm: fx.GraphModule,
) -> Callable[[fx.Node], bool]:
    """:func:`is_impure_node_for_dce` that also keeps the waits that are dead in ``gm``.

    ``gm`` is the graph before rematerialization, whose names the nodes keep. A wait
    without users there was written for its effect.
    """
    dead_waits = {
        node.name for node in gm.graph.nodes if is_wait_tensor(node) and not node.users
    }
    return lambda node: node.name in dead_waits or is_impure_node_for_dce(node)
