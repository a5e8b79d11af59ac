# Owner(s): ["module: cpp-extensions"]

"""One binary that waits from C++, loaded into stock torch and into the patched one.

A C++ extension sees headers and symbols. The headers are stock's, byte for byte, so what is compiled
against either torch is one binary; the symbols and the typed signature are the same, so it works in both.
"""

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from lazy_process_group import is_poison, lazy_group, pending, work_registry_size
from side_by_side import answer_all, ask_stock, print_answers
from stock_torch import require_patched, run_stock


WAYS = ["typed", "boxed", "direct"]
SOURCE = Path(__file__).with_name("wait_tensor_extension.cpp")


def build(directory: str) -> Path:
    """The extension, compiled against the torch that is running, and the headers it read in ``deps``."""
    root = Path(torch.__file__).parent
    library = Path(directory) / "wait_tensor_extension.so"
    include = [f"-isystem{root}/include", f"-isystem{root}/include/torch/csrc/api/include"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    command += [*include, "-MD", "-MF", f"{directory}/deps", str(SOURCE), "-o", str(library)]
    # Found by their names: whichever torch loads the extension has loaded them.
    subprocess.check_call([*command, f"-L{root}/lib", "-ltorch_cpu", "-lc10"])
    return library


def load(library) -> None:
    torch.ops.load_library(library)


def waits(way):
    op = getattr(torch.ops.wait_tensor_extension, way)
    with lazy_group() as group:
        t = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", group)
        early = is_poison(t)
        result = op(t)
        x = torch.ones(3, requires_grad=True)
        (op(x * 2) ** 2).sum().backward()
        return [early, result.data_ptr() == t.data_ptr(), result, t, x.grad, pending(), work_registry_size()]


QUESTIONS = {way: lambda way=way: waits(way) for way in WAYS}


class TestExtension(TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = Path(scratch.name)
        library = build(scratch.name)
        load(library)
        cls.patched = answer_all(QUESTIONS)
        cls.stock = ask_stock(__file__, str(library))

    @parametrize("way", WAYS)
    def test_waits(self, way):
        self.assertEqual(self.patched[way], self.stock[way])
        ones, eights = ("Tensor torch.float32 [3] [1]: " + str([n] * 3) for n in (1.0, 8.0))
        self.assertEqual(self.patched[way], [True, True, ones, ones, eights, 0, 0])

    def test_is_the_binary_that_stock_s_headers_give(self):
        stock = Path(run_stock("-c", "import torch; print(torch.__file__)").strip()).parent
        patched = Path(torch.__file__).parent
        words = (self.scratch / "deps").read_text().split()
        headers = [Path(w) for w in words if w.startswith(str(patched))]
        self.assertGreater(len(headers), 100)
        for header in headers:
            self.assertTrue(filecmp.cmp(header, stock / header.relative_to(patched), shallow=False), header)


instantiate_parametrized_tests(TestExtension)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--answers"]:
        load(sys.argv[2])
        print_answers(QUESTIONS)
    else:
        require_patched()
        run_tests()
