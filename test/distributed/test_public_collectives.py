# Owner(s): ["oncall: distributed"]

"""Every public function with a wait in it, on two gloo ranks: stock and patched give the same.

The same values, gradients, second gradients, Python types and errors, and a Work that is pending on
stock after a call is pending here. test_functional_api.py says which values are right.
"""

import faulthandler
import inspect
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn_functional
from torch import Tensor
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parent))
from side_by_side import answer_all
from stock_torch import require_patched, run_stock
from wait_tensor_programs import initial


WORLD = 2
TIMEOUT = 150
c10d = torch.ops._c10d_functional


def empties(n=WORLD):
    return [torch.empty(8 // n) for _ in range(n)]


# Each is called with this rank's tensor of 8 elements, the group and the other rank.
FUNCOL = {
    "wait_tensor": lambda x, g, peer: funcol.wait_tensor(c10d.all_reduce(x, "sum", g.group_name)),
    "broadcast": lambda x, g, peer: funcol.broadcast(x, 1, g),
    "all_reduce": lambda x, g, peer: funcol.all_reduce(x, "sum", g),
    "all_gather_single": lambda x, g, peer: funcol.all_gather_single(x.view(4, 2), 1, g),
    "all_gather_tensor": lambda x, g, peer: funcol.all_gather_tensor(x, 0, g),
    "all_gather_single_autograd": lambda x, g, peer: funcol.all_gather_single_autograd(x, 0, g),
    "all_gather_tensor_autograd": lambda x, g, peer: funcol.all_gather_tensor_autograd(x.view(4, 2), 1, g),
    "reduce_scatter_single": lambda x, g, peer: funcol.reduce_scatter_single(x.view(4, 2), "sum", 1, g),
    "reduce_scatter_tensor": lambda x, g, peer: funcol.reduce_scatter_tensor(x, "sum", 0, g),
    "reduce_scatter_single_autograd": lambda x, g, peer: funcol.reduce_scatter_single_autograd(x, "sum", 0, g),
    "reduce_scatter_tensor_autograd": lambda x, g, peer: funcol.reduce_scatter_tensor_autograd(
        x.view(4, 2), "sum", 1, g
    ),
    "all_to_all_single": lambda x, g, peer: funcol.all_to_all_single(x, None, None, g),
    "all_to_all_single_autograd": lambda x, g, peer: funcol.all_to_all_single_autograd(x, [4, 4], [4, 4], g),
    "permute_tensor": lambda x, g, peer: funcol.permute_tensor(x, [1, 0], g),
    "all_reduce_coalesced": lambda x, g, peer: funcol.all_reduce_coalesced([x, 2 * x], "sum", g),
    "all_gather_single_coalesced": lambda x, g, peer: funcol.all_gather_single_coalesced([x, 2 * x], g),
    "all_gather_into_tensor_coalesced": lambda x, g, peer: funcol.all_gather_into_tensor_coalesced([x, 2 * x], g),
    "reduce_scatter_single_coalesced": lambda x, g, peer: funcol.reduce_scatter_single_coalesced(
        [x, 2 * x], "sum", [0, 0], g
    ),
    "reduce_scatter_tensor_coalesced": lambda x, g, peer: funcol.reduce_scatter_tensor_coalesced(
        [x, 2 * x], "sum", [0, 0], g
    ),
    "all_gather_tensor_inplace": lambda x, g, peer: funcol.all_gather_tensor_inplace(torch.empty(16), x * 1, g),
    "reduce_scatter_tensor_inplace": lambda x, g, peer: funcol.reduce_scatter_tensor_inplace(
        torch.empty(4), x * 1, "sum", g
    ),
    "all_reduce_inplace": lambda x, g, peer: funcol.all_reduce_inplace(x * 1, "sum", g),
    "all_to_all_inplace": lambda x, g, peer: funcol.all_to_all_inplace(torch.empty(8), x * 1, group=g),
    "all_gather_inplace": lambda x, g, peer: funcol.all_gather_inplace(empties(1) + empties(1), x * 1, g),
    "isend_inplace": lambda x, g, peer: exchange(x, g, peer),
    "irecv_inplace": lambda x, g, peer: exchange(x, g, peer)[1],
    "batch_p2p_ops_inplace": lambda x, g, peer: funcol.batch_p2p_ops_inplace(
        ["isend", "irecv"], [peer, peer], [0, 0], [x * 1, torch.zeros(8)], g.group_name
    ),
}

NN_FUNCTIONAL = {
    "broadcast": lambda x, g, peer: nn_functional.broadcast(x * 1, 1),
    "gather": lambda x, g, peer: list(nn_functional.gather(x * 1, 0)),
    "scatter": lambda x, g, peer: nn_functional.scatter(list((x * 1).chunk(WORLD)), 0),
    "reduce": lambda x, g, peer: nn_functional.reduce(x * 1, 0),
    "reduce_scatter": lambda x, g, peer: nn_functional.reduce_scatter(torch.empty(4), list((x * 1).chunk(WORLD))),
    "all_gather": lambda x, g, peer: list(nn_functional.all_gather(x * 1)),
    "all_to_all": lambda x, g, peer: list(nn_functional.all_to_all(empties(), list((x * 1).chunk(WORLD)))),
    "all_to_all_single": lambda x, g, peer: nn_functional.all_to_all_single(torch.empty(8), x * 1),
    "all_reduce": lambda x, g, peer: nn_functional.all_reduce(x * 1),
}


def exchange(x, group, peer):
    sent = funcol.isend_inplace(x * 1, peer, 0, group)
    return [sent, funcol.irecv_inplace(torch.zeros(8), peer, 0, group)]


# What Dynamo turns into the functions named _inplace.
REMAPPED = {
    "all_gather_into_tensor": lambda x, out: dist.all_gather_into_tensor(out, x),
    "reduce_scatter_tensor": lambda x, out: dist.reduce_scatter_tensor(out[:4], x),
    "all_reduce": lambda x, out: dist.all_reduce(out[:8].copy_(x)),
    "all_to_all_single": lambda x, out: dist.all_to_all_single(out[:8], x),
    "all_gather": lambda x, out: dist.all_gather([out[:8], out[8:]], x),
}

TABLES = {"funcol": FUNCOL, "nn.functional": NN_FUNCTIONAL, "remapped": REMAPPED}
QUESTIONS = [f"{table}.{name}" for table, names in TABLES.items() for name in names]
# These have no gradient.
POINT_TO_POINT = ["isend_inplace", "irecv_inplace", "batch_p2p_ops_inplace"]
BACKENDS = ["aot_eager", "inductor"]
# One function of each kind; what Inductor generates for the others differs in the collective's name only.
INDUCTOR = ["all_reduce", "all_gather_tensor", "reduce_scatter_tensor_autograd", "all_reduce_coalesced", "permute_tensor"]

# Stock refuses: what its wait returned for one output of several is a view that was made in a Function.
SECOND = "eager, second gradient"
REFUSED_BY_STOCK = {
    f"funcol.{name}": ("RuntimeError: Output 0 of GeneratedBackward", [20, 800])
    for name in ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
}


def flat(result) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def second_gradient(fn, x):
    """The gradients of the sum of squares, and those of their squares."""
    outputs = [y for y in flat(fn(x)) if y.requires_grad]
    first = torch.autograd.grad(sum((y * y).sum() for y in outputs), x, create_graph=True)[0]
    return [first, *torch.autograd.grad((first * first).sum(), x)]


def gradient(fn, x):
    return torch.autograd.grad(sum((y * y).sum() for y in flat(fn(x)) if y.requires_grad), x)[0]


def call(fn, x):
    """The result, what is pending after the call, and at last what is still pending after its use."""
    registered = torch._C._distributed_c10d._get_work_registry_size
    before = registered()
    result = fn(x)
    kinds = [type(y).__name__ for y in flat(result)]
    pending = registered() - before
    result = [y * 1 for y in flat(result)]
    left = registered() - before
    # The handles of sends; nobody on stock waits for them under this name either.
    return [kinds, f"{pending} pending", result, f"{left} left"]


def questions(table: str, name: str, rank: int, group):
    """Every question about one function. Both ranks ask the same at the same time."""
    fn = TABLES[table][name]

    def leaf():
        return initial(rank).requires_grad_()

    if table == "remapped":

        def called(x):
            out = torch.zeros(16)
            fn(x, out)
            return out
    else:

        def called(x):
            return fn(x, group, 1 - rank)

    differentiable = table != "remapped" and name not in POINT_TO_POINT
    yield "eager", partial(call, called, initial(rank))
    # dist's own functions have no gradient. On stock all_gather_into_tensor sometimes refuses an
    # input that requires one, for a view that c10d made, and mostly does not.
    if table != "remapped":
        yield "eager, grad", partial(call, called, leaf())
    if differentiable:
        yield "eager, gradient", partial(gradient, called, leaf())
        yield "eager, second gradient", partial(second_gradient, called, leaf())
    for backend in BACKENDS if name in INDUCTOR else BACKENDS[:1]:
        compiled = torch.compile(called, backend=backend)
        yield backend, partial(call, compiled, initial(rank))
        if table != "remapped":
            yield f"{backend}, grad", partial(call, compiled, leaf())
        if differentiable:
            yield f"{backend}, gradient", partial(gradient, compiled, leaf())


def ask(rank: int, directory: str) -> None:
    # A rank that hangs says where.
    faulthandler.dump_traceback_later(TIMEOUT - 30)
    store = dist.FileStore(f"{directory}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    answers = {}
    for question in QUESTIONS:
        table, name = question.rsplit(".", 1)
        torch._dynamo.reset()
        answers[question] = answer_all(dict(questions(table, name, rank, dist.group.WORLD)))
    dist.barrier()
    with open(f"{directory}/{rank}.json", "w") as f:
        json.dump(answers, f)
    dist.destroy_process_group()


def ask_on_two_ranks(directory: str) -> None:
    # The ranks share one import of torch.
    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=ask, args=(rank, directory)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            raise SystemExit(f"a rank ended with {process.exitcode}")


class TestPublicCollectives(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.answers = []
        for run in (run_stock, lambda *args: subprocess.check_call([sys.executable, *args])):
            with tempfile.TemporaryDirectory() as directory:
                run(__file__, "--ask", directory)
                cls.answers.append([json.load(open(f"{directory}/{rank}.json")) for rank in range(WORLD)])

    @parametrize("question", QUESTIONS)
    def test_as_on_stock(self, question):
        stock, patched = self.answers
        for rank in range(WORLD):
            theirs, ours = (dict(answers[rank][question]) for answers in (stock, patched))
            if question in REFUSED_BY_STOCK:
                refusal, factors = REFUSED_BY_STOCK[question]
                self.assertIn(refusal, theirs.pop(SECOND))
                x = initial(rank)
                for text, factor in zip(ours.pop(SECOND), factors, strict=True):
                    self.assertIn(str((factor * x).tolist()), text)
            self.assertEqual(ours, theirs)

    def test_most_questions_have_results(self):
        # Two equal errors are no proof where a result is to be had.
        for name in FUNCOL:
            answers = self.answers[1][0][f"funcol.{name}"]
            for way in ("eager", "aot_eager"):
                self.assertIsInstance(answers[way], list, f"{name}: {answers[way]}")
        for name in NN_FUNCTIONAL:
            for way in ("eager", "eager, gradient"):
                answers = self.answers[1][0][f"nn.functional.{name}"]
                self.assertNotIn("Error", str(answers[way]), f"{name}: {answers[way]}")

    @parametrize("module,table", [(funcol, FUNCOL), (nn_functional, NN_FUNCTIONAL)], name_fn=lambda m, t: m.__name__.split(".")[-1])
    def test_the_table_is_complete(self, module, table):
        public = {
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
            # These are called by autograd, with the function that they are the formula of.
            and not name.endswith(("_backward", "_setup_context"))
        }
        # test_compatibility.py has the context manager.
        self.assertEqual(public - {"allow_inflight_collective_as_graph_input_ctx"}, set(table))


instantiate_parametrized_tests(TestPublicCollectives)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--ask"]:
        ask_on_two_ranks(sys.argv[2])
    else:
        require_patched()
        run_tests()
