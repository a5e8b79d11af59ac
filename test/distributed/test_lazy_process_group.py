"""The lazy process group withholds every result until its wait, and nothing else."""

import gc
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from lazy_process_group import (
    Fate,
    is_poison,
    issued,
    lazy_group,
    LazyProcessGroup,
    overwritten,
    pending,
    record,
    reset,
    Script,
    waited,
    work_registry_size,
)
from lazy_reads import watch_reads
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
    TIMEOUT_OVERRIDE,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


ops = torch.ops._c10d_functional
autograd_ops = torch.ops._c10d_functional_autograd
Tensors = list[torch.Tensor]


def functional_collectives(group: str, size: int) -> dict[str, Callable[..., object]]:
    """Every functional collective, of one tensor with `2 * size` elements."""

    def all_gather_out(x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.numel() * size)
        return ops.all_gather_into_tensor_out(x, size, group, out=out)

    def reduce_scatter_out(x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.numel() // size)
        return ops.reduce_scatter_tensor_out(x, "sum", size, group, out=out)

    splits = [2] * size
    return {
        "all_reduce": lambda x: ops.all_reduce(x, "sum", group),
        "all_reduce_avg": lambda x: ops.all_reduce(x, "avg", group),
        "all_reduce_max": lambda x: ops.all_reduce(x, "max", group),
        "all_reduce_": lambda x: ops.all_reduce_(x.clone(), "sum", group),
        "all_reduce_coalesced": lambda x: ops.all_reduce_coalesced(
            [x, x + 1], "sum", group
        ),
        "all_reduce_coalesced_": lambda x: ops.all_reduce_coalesced_(
            [x.clone(), x + 1], "sum", group
        ),
        "broadcast": lambda x: ops.broadcast(x, size - 1, group),
        "broadcast_": lambda x: ops.broadcast_(x.clone(), size - 1, group),
        "all_gather": lambda x: ops.all_gather_into_tensor(x, size, group),
        "all_gather_out": all_gather_out,
        "all_gather_coalesced": lambda x: ops.all_gather_into_tensor_coalesced(
            [x, x + 1], size, group
        ),
        "reduce_scatter": lambda x: ops.reduce_scatter_tensor(x, "sum", size, group),
        "reduce_scatter_out": reduce_scatter_out,
        "reduce_scatter_coalesced": lambda x: ops.reduce_scatter_tensor_coalesced(
            [x, x + 1], "sum", size, group
        ),
        "all_to_all": lambda x: ops.all_to_all_single(x, splits, splits, group),
    }


def expected(name: str, xs: Tensors, rank: int) -> Tensors:
    """What `rank` gets from the collective when rank i put in xs[i]."""
    size = len(xs)

    def one(xs: Tensors) -> torch.Tensor:
        stacked = torch.stack(xs)
        if name.startswith("all_reduce_avg"):
            return stacked.sum(0) / size
        if name.startswith("all_reduce_max"):
            return stacked.amax(0)
        if name.startswith("all_reduce"):
            return stacked.sum(0)
        if name.startswith("broadcast"):
            return xs[-1]
        if name.startswith("all_gather"):
            return torch.cat(xs)
        if name.startswith("reduce_scatter"):
            return stacked.sum(0).chunk(size)[rank]
        return torch.cat([x.chunk(size)[rank] for x in xs])

    if "coalesced" in name:
        return [one(xs), one([x + 1 for x in xs])]
    return [one(xs)]


COLLECTIVES = list(functional_collectives("", 1))


def check_functional(test: TestCase, name: str, group: str, xs: Tensors, rank: int):
    before = xs[rank].clone()
    issued_before = issued()
    outputs = functional_collectives(group, len(xs))[name](xs[rank])
    if isinstance(outputs, torch.Tensor):
        outputs = [outputs]
    test.assertEqual(issued() - issued_before, 1)
    test.assertEqual(pending(), 1)
    test.assertEqual(work_registry_size(), len(outputs))
    test.assertEqual(xs[rank], before)
    for output in outputs:
        test.assertTrue(is_poison(output))

    # One Work, so any of its outputs brings in all of them.
    ops.wait_tensor(outputs[-1])
    test.assertEqual(pending(), 0)
    test.assertEqual(outputs, expected(name, xs, rank))

    for output in outputs:
        ops.wait_tensor(output)
    test.assertEqual(outputs, expected(name, xs, rank))
    test.assertEqual(work_registry_size(), 0)


class LazySingleRankTest(TestCase):
    @parametrize("name", COLLECTIVES)
    def test_functional(self, name):
        with lazy_group() as group:
            check_functional(self, name, group, [torch.tensor([3.0, 4.0])], 0)

    @parametrize(
        "dtype",
        [
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
        ],
    )
    def test_dtypes(self, dtype):
        x = torch.tensor([0, 1]).to(dtype)
        with lazy_group() as group:
            output = ops.all_reduce(x, "sum", group)
            self.assertTrue(is_poison(output))
            self.assertEqual(ops.wait_tensor(output), x)

    @parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex128])
    def test_dtypes_that_are_only_moved(self, dtype):
        x = torch.tensor([1, 2]).to(dtype)
        with lazy_group() as group:
            for output in (
                ops.all_gather_into_tensor(x, 1, group),
                ops.broadcast(x, 0, group),
                ops.all_to_all_single(x, [2], [2], group),
            ):
                self.assertTrue(is_poison(output))
                self.assertEqual(ops.wait_tensor(output).to(torch.cfloat), [1, 2])

    @parametrize("shape", [(), (0,), (2, 0), (2, 3, 4)])
    def test_shapes(self, shape):
        x = torch.ones(shape)
        with lazy_group() as group:
            self.assertEqual(ops.wait_tensor(ops.all_reduce(x, "sum", group)), x)
            gathered = ops.wait_tensor(ops.all_gather_into_tensor(x, 1, group))
            self.assertEqual(gathered.reshape(shape), x)
            if shape:
                split = [shape[0]]
                y = ops.all_to_all_single(x, split, split, group)
                self.assertEqual(ops.wait_tensor(y), x)

    def test_in_place_on_a_strided_view(self):
        whole = torch.arange(6.0).reshape(2, 3)
        column = whole[:, 1]
        with lazy_group() as group:
            ops.all_reduce_(column, "sum", group)
            self.assertTrue(is_poison(column))
            self.assertEqual(whole[:, 0::2], torch.tensor([[0.0, 2.0], [3.0, 5.0]]))
            # c10d files a Work under the storage.
            ops.wait_tensor(whole)
            self.assertEqual(whole, torch.arange(6.0).reshape(2, 3))

    def test_eager_collectives(self):
        x = torch.tensor([3.0, 4.0])
        with lazy_group():
            for call in (
                lambda out: dist.all_reduce(out, async_op=True),
                lambda out: dist.broadcast(out, 0, async_op=True),
                lambda out: dist.all_gather([out], x, async_op=True),
                lambda out: dist.all_gather_into_tensor(out, x, async_op=True),
                lambda out: dist.reduce_scatter(out, [x], async_op=True),
                lambda out: dist.reduce_scatter_tensor(out, x, async_op=True),
                lambda out: dist.all_to_all_single(out, x, async_op=True),
            ):
                out = x.clone()
                work = call(out)
                self.assertTrue(is_poison(out))
                self.assertFalse(work.is_completed())
                work.wait()
                self.assertTrue(work.is_completed())
                self.assertEqual(out, x)
            self.assertEqual(issued(), waited())

    def test_barrier(self):
        with lazy_group():
            work = dist.barrier(async_op=True)
            self.assertFalse(work.is_completed())
            work.wait()
            dist.barrier()
            self.assertEqual((issued(), waited()), (2, 2))

    def test_second_wait_leaves_later_writes_alone(self):
        x = torch.ones(2)
        with lazy_group():
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            x.fill_(7)
            work.wait()
            self.assertEqual(x, torch.full((2,), 7.0))
            self.assertEqual(waited(), 1)

    def test_ignored_wait_is_pending(self):
        with lazy_group(allow_pending=True) as group:
            y = ops.all_reduce(torch.ones(2), "sum", group)
            self.assertEqual((issued(), waited(), pending()), (1, 0, 1))
        # The group is gone; its Work is not, and c10d still holds it.
        self.assertEqual(work_registry_size(), 1)
        self.assertEqual(ops.wait_tensor(y), torch.ones(2))
        self.assertEqual((pending(), work_registry_size()), (0, 0))

    def test_group_complains_of_an_ignored_wait(self):
        with self.assertRaisesRegex(AssertionError, "1 of 2 collectives"):
            with lazy_group() as group:
                ops.wait_tensor(ops.all_reduce(torch.ones(2), "sum", group))
                y = ops.all_reduce(torch.ones(2), "sum", group)
        self.assertFalse(dist.is_initialized())
        ops.wait_tensor(y)

    def test_group_does_not_hide_an_exception(self):
        with self.assertRaises(KeyError):
            with lazy_group() as group:
                y = ops.all_reduce(torch.ones(2), "sum", group)
                raise KeyError
        ops.wait_tensor(y)

    def test_reset_forgets_what_is_pending(self):
        with lazy_group() as group:
            y = ops.all_reduce(torch.ones(2), "sum", group)
            reset()
            self.assertEqual(pending(), 0)
            ops.wait_tensor(y)
            self.assertEqual((issued(), waited()), (0, 0))

    def test_registry_alone_keeps_the_work(self):
        with lazy_group() as group:
            y = ops.all_reduce(torch.ones(2), "sum", group)
            out = torch.empty(2)
            ops.all_gather_into_tensor_out(torch.ones(2), 1, group, out=out)
            gc.collect()
            self.assertEqual(ops.wait_tensor(y), torch.ones(2))
            self.assertEqual(ops.wait_tensor(out), torch.ones(2))

    def test_waited_work_keeps_no_tensor(self):
        x = torch.ones(2)
        storage = StorageWeakRef(x.untyped_storage())
        with lazy_group():
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            del x
            self.assertTrue(storage.expired())
            self.assertTrue(work.is_completed())

    def test_chained_without_a_wait_stays_poisoned(self):
        with lazy_group() as group:
            y = ops.all_reduce(torch.ones(2), "sum", group)
            z = ops.all_reduce(y, "sum", group)
            ops.wait_tensor(y)
            self.assertEqual(y, torch.ones(2))
            self.assertTrue(is_poison(ops.wait_tensor(z)))

    def test_writes_are_hidden_from_autograd(self):
        w = torch.ones(2, requires_grad=True)
        with lazy_group() as group:
            y = torch.zeros(2)
            ops.all_reduce_(y.fill_(1), "sum", group)
            z = w * y
            ops.wait_tensor(y)
            self.assertEqual(y._version, 1)
            z.sum().backward()
            # The product was early, the saved tensor was not read until now.
            self.assertTrue(is_poison(z))
            self.assertEqual(w.grad, torch.ones(2))

    def test_backward(self):
        # The engine runs C++ nodes without the GIL.
        x = torch.ones(2, requires_grad=True)
        with lazy_group() as group:
            y = ops.wait_tensor(autograd_ops.all_gather_into_tensor(x, 1, group))
            (3 * y).sum().backward()
            self.assertEqual(x.grad, torch.full((2,), 3.0))
            self.assertEqual(issued(), 2)

    def test_inference_mode(self):
        with lazy_group() as group:
            with torch.inference_mode():
                y = ops.all_reduce(torch.ones(2), "sum", group)
            self.assertEqual(ops.wait_tensor(y), torch.ones(2))

    def test_in_flight_graph_input(self):
        from torch.distributed._functional_collectives import (
            allow_inflight_collective_as_graph_input_ctx,
        )

        x = torch.ones(2)
        with lazy_group(), allow_inflight_collective_as_graph_input_ctx():
            dist.all_reduce(x, async_op=True)
            self.assertEqual(ops.wait_tensor(x), torch.ones(2))

    def test_wait_from_many_threads(self):
        x = torch.ones(2)
        with lazy_group():
            work = dist.all_reduce(x, async_op=True)
            threads = [threading.Thread(target=work.wait) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            self.assertEqual(x, torch.ones(2))
            self.assertEqual(waited(), 1)

    def test_unimplemented_collective_fails(self):
        with lazy_group():
            with self.assertRaisesRegex(RuntimeError, "[Nn]o backend type"):
                dist.reduce(torch.ones(2), 0)

    def test_gloo_group_beside_it_is_not_lazy(self):
        with lazy_group():
            gloo = dist.new_group([0], backend="gloo").group_name
            out = torch.empty(2)
            ops.all_gather_into_tensor_out(torch.ones(2), 1, gloo, out=out)
            self.assertEqual(ops.wait_tensor(out), torch.ones(2))
            self.assertEqual(issued(), 0)

    def test_compiled_program_reaches_it_at_run_time_only(self):
        with lazy_group() as group:

            def f(x):
                return ops.wait_tensor(ops.all_reduce(x * 1, "sum", group)) * 2

            compiled = torch.compile(f, backend="inductor", fullgraph=True)
            for calls in (1, 2):
                # What it reads is the business of the patch's own tests.
                compiled(torch.ones(4))
                self.assertEqual((issued(), waited()), (calls, calls))
            self.assertEqual(work_registry_size(), 0)

    def test_writes_in_flight_are_found(self):
        with lazy_group() as group:
            x = torch.ones(2)
            y = ops.all_gather_into_tensor(x, 1, group)
            x.add_(1)
            ops.wait_tensor(y)
            z = ops.all_reduce(x, "sum", group)
            z[0] = 5
            ops.wait_tensor(z)
            self.assertEqual(
                [e.overwritten for e in overwritten()], [["input"], ["output"]]
            )

    def test_early_reads_are_found(self):
        with lazy_group() as group, watch_reads() as found:
            y = ops.all_reduce(torch.ones(2), "sum", group)
            view = y[1:]  # reads nothing
            torch.empty_like(y)
            self.assertEqual(found, [])
            view + 1
            ops.wait_tensor(view)
            view + 1
            self.assertEqual([str(r.operator) for r in found], ["aten.add.Tensor"])

    def test_record_says_who_waited(self):
        with lazy_group() as group:
            y = ops.all_reduce(torch.ones(2), "sum", group)
            thread = threading.Thread(target=ops.wait_tensor, args=(y,), name="other")
            thread.start()
            thread.join(60)
            (entry,) = record().entries
            self.assertEqual((entry.collective, entry.rank), ("allreduce", 0))
            self.assertEqual((entry.done, entry.waiters), (True, ["other"]))

    def test_others_may_complete_first(self):
        script = Script(order=lambda pending: pending[::-1])
        with lazy_group(script=script) as group:
            ys = [ops.all_reduce(torch.ones(2), "sum", group) for _ in range(2)]
            ops.wait_tensor(ys[0])
            self.assertEqual(ys[1], torch.ones(2))
            self.assertEqual(pending(), 0)
            ops.wait_tensor(ys[1])

    def test_fates(self):
        for fate, message in (
            (Fate(error=RuntimeError("link down")), "link down"),
            (Fate(never=True), "number 0 of group .* timed out after 0.1 s"),
        ):
            script = Script(fate=lambda entry: fate)
            with lazy_group(
                allow_pending=True, timeout=timedelta(seconds=0.1), script=script
            ) as group:
                y = ops.all_reduce(torch.ones(2), "sum", group)
                with self.assertRaisesRegex(RuntimeError, message):
                    ops.wait_tensor(y)
                self.assertTrue(is_poison(y))

    def test_simulated_ranks(self):
        x = torch.arange(4.0)
        with lazy_group(3, simulated=True) as group:
            sub = dist.new_group([0, 2], backend="simulated").group_name
            for name, result, size in ((group, 6 * x, 3), (sub, 4 * x, 2)):
                self.assertEqual(ops.wait_tensor(ops.all_reduce(x, "sum", name)), result)
                gathered = ops.wait_tensor(ops.all_gather_into_tensor(x, size, name))
                self.assertEqual(gathered.view(size, -1).sum(0), result)
            scattered = ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 2, sub))
            self.assertEqual(scattered, 4 * x[:2])


class LazyTwoRankTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        TIMEOUT_OVERRIDE[self._testMethodName] = 60
        self._spawn_processes()

    def group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        return lazy_group(self.world_size, self.rank, store)

    def test_functional(self):
        xs = [torch.arange(4.0) + 10 * rank for rank in range(self.world_size)]
        with self.group() as name:
            for collective in COLLECTIVES:
                check_functional(self, collective, name, xs, self.rank)

            # Ragged splits: rank r sends r + 1 rows to rank 0 and the rest to rank 1.
            rows = torch.arange(8.0).reshape(4, 2) + 10 * self.rank
            sent = [self.rank + 1, 3 - self.rank]
            received = [1, 2] if self.rank == 0 else [3, 2]
            y = ops.wait_tensor(ops.all_to_all_single(rows, received, sent, name))
            self.assertEqual(y.shape, (sum(received), 2))

            ints = torch.tensor([3, -4]) + self.rank
            y = ops.wait_tensor(ops.all_reduce(ints, "avg", name))
            self.assertEqual(y, torch.tensor([3, -3]))

            sub = dist.new_group([0, 1], backend="lazy")
            self.assertIsInstance(sub, LazyProcessGroup)
            check_functional(self, "all_reduce", sub.group_name, xs, self.rank)
            dist.barrier()

    def test_point_to_point(self):
        peer = 1 - self.rank
        with self.group() as name:
            mine = torch.full((3,), float(self.rank))
            theirs = torch.full((3,), float(peer))

            # Either order has to work: neither call may block.
            for receive_first in (False, True):
                got = torch.zeros(3)
                if receive_first:
                    works = [dist.irecv(got, peer), dist.isend(mine, peer)]
                else:
                    works = [dist.isend(mine, peer), dist.irecv(got, peer)]
                self.assertTrue(is_poison(got))
                self.assertEqual(pending(), 2)
                for work in works:
                    work.wait()
                self.assertEqual(got, theirs)

            got = torch.zeros(3)
            sent = ops.isend(mine, peer, 0, name)
            got = ops.irecv(got, peer, 0, name)
            self.assertTrue(is_poison(got))
            self.assertEqual(ops.wait_tensor(got), theirs)
            # c10d files a send under what the op returns and under what it sends.
            ops.wait_tensor(sent)
            ops.wait_tensor(mine)
            self.assertEqual((pending(), work_registry_size()), (0, 0))

            got = torch.zeros(3)
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, peer)]
            ):
                work.wait()
            self.assertEqual(got, theirs)
            dist.barrier()


instantiate_parametrized_tests(LazySingleRankTest)

if __name__ == "__main__":
    run_tests()
