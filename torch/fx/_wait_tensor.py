"""Which FX nodes wait for a pending collective.

Between functionalization and Inductor's reinplacing a wait is
``_c10d_functional._wait_tensor_functional``; before and after, it is
``_c10d_functional.wait_tensor``. A pass that asks "is this a wait?" means both,
whatever stage its graph is in, and asks here.
"""

import functools

import torch
from torch.fx.node import Node


@functools.cache
def wait_tensor_ops() -> list[torch._ops.OpOverload]:
    """The targets of a wait, the in-place one first.

    Empty where PyTorch was built without distributed.
    """
    try:
        ops = torch.ops._c10d_functional
        return [ops.wait_tensor.default, ops._wait_tensor_functional.default]
    except AttributeError:
        return []


def is_wait_tensor(node: Node) -> bool:
    """Whether ``node`` waits for a pending collective, in either form."""
    return node.op == "call_function" and node.target in wait_tensor_ops()


def is_waited_alias(node: Node) -> bool:
    """Whether ``node`` is what a wait returned, or a view of that.

    For bodies of higher-order ops as Dynamo traced them, where a wait may be called
    through a packet or by its legacy name. Such a value shares memory with what was
    waited for only until the body is functionalized.
    """

    def storage(n):
        val = n.meta.get("example_value", n.meta.get("val"))
        return val.untyped_storage()._cdata if isinstance(val, torch.Tensor) else None

    names = ("_c10d_functional.wait_tensor", "c10d_functional.wait_tensor")
    while node.op in ("call_function", "call_method"):
        if str(node.target).removesuffix(".default") in names:
            return True
        base = node.args[0] if node.args else None
        if not isinstance(base, Node) or storage(base) != storage(node):
            return False
        node = base
    return False


def node_name(op: torch._ops.OpOverload) -> str:
    """What a traced call of ``op`` is named after, before FX makes the name unique.

    A functional wait is named as the wait it will be again: passes and tools look
    waits up by name, and saved tensors carry the name into the backward's code.
    """
    return (op if op not in wait_tensor_ops() else wait_tensor_ops()[0])._opname
