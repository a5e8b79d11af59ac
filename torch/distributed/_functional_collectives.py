"""The Python halves of the two waits: what they do on meta tensors.

Autograd needs nothing for the in-place wait, which returns its input. Its
formula moves to the functional one (see the rules beside this file).
"""

from torch._prims_common import compute_required_storage_length
from torch.fx.experimental.symbolic_shapes import statically_known_true


def _wait_tensor_meta(self, *args):
    return self


# The same geometry as the C++ kernel gives: a trace must see the strides, gaps
# and overlaps that it gets once the wait has been reinplaced.
# patch: after _wait_tensor_meta
def _wait_tensor_functional_meta(self):
    if statically_known_true(self.storage_offset() == 0):
        return self.new_empty_strided(self.size(), self.stride())
    length = compute_required_storage_length(
        self.size(), self.stride(), self.storage_offset()
    )
    return self.new_empty((length,)).as_strided(
        self.size(), self.stride(), self.storage_offset()
    )


# The fallbacks of these keys would hand it a materialized copy, read in flight.
legacy_lib_impl.impl("wait_tensor", torch.library.fallthrough_kernel, "Conjugate")
legacy_lib_impl.impl("wait_tensor", torch.library.fallthrough_kernel, "Negative")
