"""Archives in which wait_tensor still claims to be pure keep loading."""

import dataclasses

from torch.fx._wait_tensor import wait_tensor_ops


# patch: before GraphModuleDeserializer
def upgrade_wait_tensor(target: Any, node: Node) -> Any:
    """The op that a wait in an archive stands for.

    Until 2.13 the argument of ``wait_tensor`` was named ``tensor`` and its schema was
    functional, and so is the graph that holds it: it means the functional wait. Renames
    the argument in ``node``.
    """
    (argument, *_) = node.inputs or [None]
    if target not in wait_tensor_ops()[:1] or argument.name != "tensor":
        return target
    node.inputs[0] = dataclasses.replace(argument, name="self")
    return wait_tensor_ops()[1]
