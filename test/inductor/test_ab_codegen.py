# Owner(s): ["module: inductor"]

"""Inductor's code for a few distributed programs is what stock torch generates.

The whole list, more worlds, more configurations, and two real ranks:
``python benchmarks/ab_codegen.py``. What is compared, and why, stands there.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_utils import run_tests, TestCase


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import ab_codegen


PROGRAMS = (
    "async_tp",
    "coalesced",
    "ddp_python_reducer",
    "fsdp_by_hand",
    "input_in_flight_and_updated",
    "nested_region",
    "simple_fsdp",
    "slice_waited_then_mutated",
    "summed_reduce_scatters",
    "wait_ignored",
    "wait_on_slice_of_input",
)
CONFIGS = (
    "default",
    "reorder",
    "bucket_everything",
    "overlap_bucketing",
    "micro_pipeline_tp",
    "fuse_ddp_concat",
    "dedup_reduce_scatters",
)

CODE = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
    tmp3.store(out_ptr0);  // a store
''')
async_compile.wait(globals())

class Runner:
    def call(self, args):
        arg0_1, = args
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.add]
        buf0 = empty_strided_cpu((8, 2), (2, 1), torch.float32)
        cpp_fused_add_0(arg0_1, buf0)
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        buf3 = buf0; del buf0  # reuse
        return (buf3, )

def get_args():
    return [rand_strided((8, 2), (2, 1))]
"""


class TestComparison(TestCase):
    """The harness itself: what it must not let pass, and what means nothing."""

    def compare(self, patched: str, program: str = "a_program") -> ab_codegen.Comparison:
        stock, patched = ({"graphs": [{"code": c, "fx": ""}], "error": None} for c in (CODE, patched))
        return ab_codegen.compare_code(("fake2", program, "plain", "default"), stock, patched)

    def test_counts(self):
        self.assertEqual(
            ab_codegen.counts(CODE),
            {
                "kernels": 1,
                "extern": 0,
                "buffers": 1,
                "copies": 0,
                "collectives": 1,
                "waits": 1,
                "functional waits": 0,
                "partitions": 0,
                "bytes": 64,
            },
        )

    def test_numbers_and_comments_mean_nothing(self):
        renamed = CODE.replace("buf0", "buf7").replace("fused_add_0", "fused_mul_4").replace("arg0_1", "primals_2")
        result = self.compare(renamed.replace("[aten.add]", "[aten.mul]").replace("// a store", ""))
        self.assertEqual(result.verdict, "equal", result.diff)
        self.assertFalse(result.failed)

    def test_each_count_that_gets_worse_fails(self):
        call = "        cpp_fused_add_0(arg0_1, buf0)\n"
        for what, line in {
            "kernels": call,
            "buffers": "        buf9 = empty_strided_cpu((1, ), (1, ), torch.int8)\n",
            "bytes": "        buf9 = empty_strided_cpu((1, ), (1, ), torch.int8)\n",
            "copies": "        buf0.copy_(arg0_1)\n",
            "collectives": "        torch.ops._c10d_functional.broadcast_.default(buf0, 0, '0')\n",
            "waits": "        torch.ops._c10d_functional.wait_tensor.default(buf0)\n",
            "extern": "        extern_kernels.mm(buf0, buf0, out=buf0)\n",
            "functional waits": "        # Original ATen: [_c10d_functional._wait_tensor_functional]\n",
        }.items():
            # Listing the difference does not help.
            for program in ("a_program", "wait_on_slice_of_input"):
                result = self.compare(CODE.replace(call, call + line), program)
                self.assertEqual(result.verdict, "WORSE", what)
                self.assertIn(f"{what} ", result.detail)
                self.assertTrue(result.failed)

    def test_a_difference_must_be_listed(self):
        other = CODE.replace("'sum'", "'avg'")
        self.assertTrue(self.compare(other).failed)
        self.assertFalse(self.compare(other, "wait_on_slice_of_input").failed)
        better = CODE.replace("        buf3 = buf0; del buf0  # reuse\n", "").replace("_0(arg0_1, buf0)", "_0(buf0)")
        self.assertTrue(self.compare(better).failed)

    def test_a_failure_of_the_patched_side_fails(self):
        good, bad = {"graphs": [], "error": None}, {"graphs": [], "error": "an error"}
        key = ("fake2", "wait_on_slice_of_input", "plain", "default")
        self.assertTrue(ab_codegen.compare_code(key, good, bad).failed)
        self.assertFalse(ab_codegen.compare_code(key, bad, bad).failed)


class TestStockAndPatched(TestCase):
    # Two minutes of CPU time; a busy machine stretches them.
    @pytest.mark.timeout(1200)
    def test_code(self):
        results = ab_codegen.run(
            ab_codegen.Options(
                only=PROGRAMS,
                configs=CONFIGS,
                variants=("plain", "compiled_autograd"),
                worlds=(2,),
                modes=("fake",),
                patched=Path(torch.__file__).parents[1],
            ),
            report=lambda result: None,
        )
        self.assertGreaterEqual(len(results), len(PROGRAMS) * len(CONFIGS))
        # A program that no longer compiles at all would make this test pass.
        uncompiled = [r for r in results if r.verdict in ("both fail", "no graph")]
        self.assertEqual(["/".join(r.key) for r in uncompiled], [])
        # Nor may a pass that no longer matches anything.
        idle = [config for config, programs in ab_codegen.fired(results).items() if not programs]
        self.assertEqual(idle, [])
        failed = [r for r in results if r.failed]
        self.assertEqual(
            failed, [], "\n\n".join(f"{'/'.join(r.key)}: {r.verdict} {r.detail}\n{r.diff}" for r in failed)
        )


if __name__ == "__main__":
    run_tests()
