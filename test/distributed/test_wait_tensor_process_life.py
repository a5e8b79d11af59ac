# Owner(s): ["oncall: distributed"]

"""A process that imports torch, forks, spawns, reloads and exits, with and without waits: as on stock, word for word."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parent))
from stock_torch import require_patched, stock_environment


# What a process does after `import torch`, and its exit status.
GROUP = """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        def issue(x):
            return torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        def wait(x):
            return torch.ops._c10d_functional.wait_tensor(x)
        """
LIVES: dict[str, tuple[str, int]] = {
    "import": ("", 0),
    "import_without_distributed_in_use": ("torch.ops._c10d_functional.wait_tensor(torch.ones(2))", 0),
    "import_every_module_that_the_patch_changes": (
        """
        import torch._dynamo, torch._export, torch._functorch.aot_autograd, torch._inductor.compile_fx
        import torch.distributed._functional_collectives, torch.distributed._tools.mem_tracker
        import torch.distributed.tensor, torch.utils.checkpoint
        """,
        0,
    ),
    "exit_with_nothing_pending": (GROUP + "print(wait(issue(torch.ones(2))))", 0),
    "exit_with_a_wait_pending": (GROUP + "y = issue(torch.ones(2))", 0),
    "exit_after_destroy_with_a_wait_pending": (GROUP + "y = issue(torch.ones(2)); dist.destroy_process_group()", 0),
    "exit_after_an_exception": (GROUP + "y = issue(torch.ones(2)); raise ValueError('stop')", 1),
    "exit_by_sys_exit_after_a_wait_in_a_thread": (
        GROUP
        + """
        import sys, threading
        y = issue(torch.ones(2))
        thread = threading.Thread(target=wait, args=(y,))
        thread.start(); thread.join()
        sys.exit(3)
        """,
        3,
    ),
    "fork_before_the_first_wait": (
        """
        import os
        child = os.fork()
        if not child:
            print(torch.ops._c10d_functional.wait_tensor(torch.ones(2)), flush=True)
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        0,
    ),
    "fork_after_waits": (
        """
        import os
        wait = torch.ops._c10d_functional.wait_tensor
        wait(torch.ones(2, requires_grad=True))
        torch.func.functionalize(wait)(torch.ones(2))
        child = os.fork()
        if not child:
            print(wait(torch.ones(2, requires_grad=True)), torch.func.functionalize(wait)(torch.ones(2)), flush=True)
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        0,
    ),
    "spawn": (
        """
        import torch.multiprocessing
        def wait(x):
            return torch.ops._c10d_functional.wait_tensor(x)
        if __name__ == "__main__":
            with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(wait, (torch.ones(2),)))
        """,
        0,
    ),
    "reload_funcol": (
        GROUP
        + """
        import importlib
        import torch.distributed._functional_collectives as funcol
        before = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        try:
            importlib.reload(funcol)
        except RuntimeError as e:  # one definition of the legacy ops is all that torch allows
            print(e)
        x = torch.ones(2, requires_grad=True)
        wait(x * 2).sum().backward()
        print(wait(before.elem if hasattr(before, "elem") else before), x.grad)
        """,
        0,
    ),
    "purge_and_import_funcol_again": (
        """
        import sys
        import torch.distributed._functional_collectives
        del sys.modules["torch.distributed._functional_collectives"]
        import torch.distributed._functional_collectives
        """,
        1,
    ),
}


def live(path: Path, env: dict[str, str] | None) -> tuple[int, str, str]:
    """How the process ended and what it said, less what differs between two runs of one torch."""
    done = subprocess.run([sys.executable, "-W", "always", path], env=env, capture_output=True, text=True, timeout=120)

    def plain(text: str) -> str:
        text = re.sub(r"\S*/torch/", "torch/", re.sub(r"0x[0-9a-f]+", "0x…", text))
        # A warning's date, and the schema of the wait, which is to differ.
        text = re.sub(r"W\d{4} \d\d:\d\d:\d\d\.\d+", "W…", text)
        text = re.sub(r"operator: _c10d_functional::_?wait_tensor.*", "operator: …", text)
        return re.sub(r"(torch/\S+?)(\", line |:)\d+", r"\1\2…", text)

    return done.returncode, plain(done.stdout), plain(done.stderr)


class TestProcessLife(TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        lives = {}
        with ThreadPoolExecutor(2) as pool:
            for name, (body, _) in LIVES.items():
                path = Path(scratch.name, f"{name}.py")
                path.write_text("import torch\n" + textwrap.dedent(body).lstrip())
                lives[name] = [pool.submit(live, path, env) for env in (stock_environment(), dict(os.environ))]
        cls.lives = {name: [future.result() for future in futures] for name, futures in lives.items()}

    @parametrize("name", LIVES)
    def test_as_on_stock(self, name):
        stock, patched = self.lives[name]
        self.assertEqual(patched, stock)
        self.assertEqual(patched[0], LIVES[name][1], patched[2])


instantiate_parametrized_tests(TestProcessLife)

if __name__ == "__main__":
    require_patched()
    run_tests()
