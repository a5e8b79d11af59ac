"""Each wait of the joint graph runs in the graph it was traced for."""


# patch: after is_not_collective
def is_impure_in_forward(node: fx.Node) -> bool:
    """What default_partition's DCE must keep in the forward graph."""
    if is_wait_tensor(node):
        return not _has_tag_is_backward(node)
    return is_not_collective(node)


# patch: after is_not_collective
def is_impure_in_backward(node: fx.Node) -> bool:
    """What default_partition's DCE must keep in the backward graph."""
    if is_wait_tensor(node):
        return _has_tag_is_backward(node)
    return is_not_collective(node)
