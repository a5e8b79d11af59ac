"""Copying back what autograd has not seen, for compilers that get no copy_ in the graph."""


# patch: before _RuntimeForwardEpilogue
def copy_hidden_from_autograd(dst: Tensor, src: Tensor) -> None:
    """Update ``dst`` from ``src``, both of one shape, leaving its autograd state alone.

    A mutation that autograd has not seen must not show in ``grad_fn`` or ``_version``
    afterwards either: whoever saved ``dst`` before a wait may still go backward.
    """
    version = (
        nullcontext()
        if dst.is_inference()
        else torch.autograd._unsafe_preserve_version_counter(dst)
    )
    with torch.no_grad(), version:
        dst.copy_(src)
