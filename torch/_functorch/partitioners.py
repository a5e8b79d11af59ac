"""Each wait of the joint graph runs in the graph it was traced for."""


# patch: after is_not_collective
def is_impure_after_partitioning(node: fx.Node, own_waits: bool) -> bool:
    """What default_partition's DCE keeps in the forward or in the backward graph.

    Nodes that depend on primals alone are copied into both graphs, so collectives,
    impure as they are, must die where nothing uses them. A wait must not where it
    was traced (``own_waits``): unwaited, its Work leaks, and ranks that reuse the
    buffer desync.
    """
    return own_waits if is_wait_tensor(node) else is_not_collective(node)
