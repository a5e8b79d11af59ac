"""Programs that wait inside the bodies of higher-order ops."""

import contextlib

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop


__all__ = ["Bodies", "BODIES"]

c10d = torch.ops._c10d_functional


@torch.library.custom_op("test_wait_tensor::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@note.register_fake
def _(x):
    return torch.empty_like(x)


note.register_autograd(lambda ctx, grad: grad)


@torch.compiler.nested_compile_region
def region_that_waits(y):
    c10d.wait_tensor(y)
    return y * 2


@torch.compiler.nested_compile_region
def region_that_returns_what_it_waited_for(y):
    return c10d.wait_tensor(y)


class SquareThatWaits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        c10d.wait_tensor(y)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 2 * y * grad


class Bodies:
    """Each maps a tensor to twice its sum over the ranks of ``self.group``, or, if it
    squares, to that times how much larger the sum is than the tensor.
    """

    group: str

    def all_reduce(self, x):
        return c10d.all_reduce(x * 1, "sum", self.group)

    def cond(self, x):
        def double(x):
            y = self.all_reduce(x)
            c10d.wait_tensor(y)
            return y * 2

        return torch.cond(x.sum() > 0, double, lambda x: x * 3, (x,))

    def cond_on_input(self, x):
        return torch.cond(
            x.sum() > 0,
            lambda y: c10d.wait_tensor(y) * 2,
            lambda y: c10d.wait_tensor(y) * 3,
            (self.all_reduce(x),),
        )

    def cond_that_returns_its_input(self, x):
        return torch.cond(
            x.sum() > 0,
            lambda y: c10d.wait_tensor(y),
            lambda y: c10d.wait_tensor(y) * 3,
            (self.all_reduce(x * 2),),
        )

    def while_loop(self, x):
        _, y = while_loop(
            lambda i, x: i < 1,
            lambda i, x: (i + 1, c10d.wait_tensor(self.all_reduce(x)) * 2),
            (torch.tensor(0), x),
        )
        return y

    def while_loop_on_input(self, x):
        _, y = while_loop(
            lambda i, y: i < 1,
            lambda i, y: (i + 1, c10d.wait_tensor(y) * 2),
            (torch.tensor(0), self.all_reduce(x)),
        )
        return y

    def map(self, x):
        return hop_map(lambda x: c10d.wait_tensor(self.all_reduce(x)) * 2, x)

    def scan(self, x):
        def combine(carry, x):
            y = self.all_reduce(x)
            c10d.wait_tensor(y)
            return carry + y, y * 2

        _, ys = scan(combine, torch.zeros(()), x)
        return ys

    def invoke_subgraph(self, x):
        return region_that_waits(self.all_reduce(x))

    def invoke_subgraph_that_returns_its_input(self, x):
        return region_that_returns_what_it_waited_for(self.all_reduce(x)) * 2

    def checkpoint(self, x):
        def double(x):
            y = self.all_reduce(x)
            c10d.wait_tensor(y)
            return y * 2

        return torch.utils.checkpoint.checkpoint(double, x, use_reentrant=False)

    def checkpoint_that_recomputes(self, x):
        # On stock the recomputed wait is dropped, and the gradient is a NaN.
        def square(x):
            y = self.all_reduce(x)
            c10d.wait_tensor(y)
            return y * y

        return torch.utils.checkpoint.checkpoint(square, x, use_reentrant=False) / x * 2

    def autograd_function(self, x):
        return SquareThatWaits.apply(self.all_reduce(x)) / x * 2

    def effectful_op(self, x):
        # The op that has effects is called through with_effects, on a waited tensor.
        y = self.all_reduce(x)
        c10d.wait_tensor(y)
        return note(y) * 2

    @contextlib.contextmanager
    def effects(self):
        """As torch.library registers ops that must keep their order, here also the wait."""
        ops = [torch.ops.test_wait_tensor.note.default, c10d.wait_tensor.default]
        handles = [_register_effectful_op(op, _EffectType.ORDERED) for op in ops]
        try:
            yield
        finally:
            for handle in handles:
                handle.destroy()


BODIES = {
    name: body
    for name, body in vars(Bodies).items()
    if not name.startswith("_") and name not in ("all_reduce", "effects")
}
