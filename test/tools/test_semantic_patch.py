# Owner(s): ["oncall: distributed"]
"""tools/semantic_patch on small trees: what it writes, what it refuses, and that it leaves no trace."""

import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from collections import namedtuple
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock


REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tools.semantic_patch import __main__ as cli, Patch, PatchError  # noqa: E402
from tools.semantic_patch import tree as tree_module  # noqa: E402


def text(s):
    return textwrap.dedent(s).lstrip("\n")


def rule(pattern, fix, matches=1, metadata="", **keys):
    """A rule's YAML document."""
    keys = {"id": "a-rule", "language": "python", "message": "what it finds", "note": "why", **keys}
    lines = [f"{k}: {v}" for k, v in keys.items() if v is not None]
    lines += ["rule:", "  pattern: |", textwrap.indent(text(pattern).rstrip("\n"), "    ")]
    lines += ["fix: |", textwrap.indent(text(fix).rstrip("\n"), "  ")] if fix else ['fix: ""']
    lines += ["metadata:", f"  matches: {matches}", textwrap.indent(text(metadata), "  ")]
    return "\n".join(lines) + "\n"


class Case(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.tmp = Path(directory.name).resolve()
        self.tree, self.root = self.tmp / "tree", self.tmp / "patch"
        (self.root / "torch").mkdir(parents=True)
        self.put(self.tree, "torch/version.py", "from typing import Optional\n__version__ = '2.13.0+cpu'\n")
        (self.tree / "torch/lib").mkdir()

    def put(self, base, rel, content):
        path = base / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def upstream(self, content, rel="torch/x.py"):
        return self.put(self.tree, rel, text(content))

    def ours(self, content, rel="torch/x.py"):
        return self.put(self.root, rel, text(content))

    def checkout(self):
        shutil.rmtree(self.tree)
        self.put(self.tree, "version.txt", "2.13.0a0\n")
        self.put(self.tree, "setup.py", "")
        (self.tree / "torch/csrc").mkdir(parents=True)

    @property
    def patch(self):
        return Patch([self.root])

    def result(self, rel="torch/x.py"):
        return self.patch.plan(self.tree)[rel][1].decode()

    def expect(self, expected, rel="torch/x.py"):
        self.assertEqual(self.result(rel), text(expected))

    def refuse(self, *parts, call=None):
        """The call (apply unless told) fails, says all of `parts`, and touches nothing."""
        before = self.snapshot()
        with self.assertRaises(PatchError) as caught:
            (call or (lambda: self.patch.apply(self.tree)))()
        for part in parts:
            self.assertIn(part, str(caught.exception))
        self.assertEqual(self.snapshot(), before)

    def snapshot(self, base=None):
        """Every path of the tree with its type, bytes, mode, inode and mtime."""
        found = {}
        for path in sorted((base or self.tree).rglob("*")):
            s = path.lstat()
            data = path.read_bytes() if path.is_file() else None
            found[str(path)] = (data, s.st_mode, s.st_ino if path.is_file() else 0, s.st_mtime_ns if data else 0)
        return found

    def contents(self):
        return {path: (data, mode) for path, (data, mode, _, _) in self.snapshot().items()}


class TestRules(Case):
    def test_rewrites_every_match(self):
        self.upstream("a = n.target is C.wait.default\nb = m.target is D.wait.default\n")
        self.ours(rule("$N.target is $C.wait.default", "is_wait($N)", matches=2), "torch/x.yml")
        self.expect("a = is_wait(n)\nb = is_wait(m)\n")

    def test_positions_are_right_after_non_ascii_text(self):
        self.upstream('x = "é😀"; f(1)\n')
        self.ours(rule("f($A)", "g($A)"), "torch/x.yml")
        self.expect('x = "é😀"; g(1)\n')

    def test_multi_line_fix_takes_the_indentation_of_the_match(self):
        self.upstream("""
            class A:
                def f(self):
                    wait(x)
                    return 1
        """)
        self.ours(rule("wait($X)", "if $X:\n    wait($X)\n\nelse:\n    pass"), "torch/x.yml")
        self.expect("""
            class A:
                def f(self):
                    if x:
                        wait(x)

                    else:
                        pass
                    return 1
        """)

    def test_captured_lines_move_with_the_template(self):
        self.upstream('''
            def f():
                if a:
                    x = """
              text
                    """
                    if b:
                        y = 1
        ''')
        self.ours(rule("if a:\n    $$$BODY", "with lock:\n    if a:\n        $$$BODY"), "torch/x.yml")
        self.expect('''
            def f():
                with lock:
                    if a:
                        x = """
              text
                    """
                        if b:
                            y = 1
        ''')

    def test_empty_fix_deletes_the_line(self):
        self.upstream("a = 1\nregister(f)\nb = 2\n")
        self.ours(rule("register($F)", ""), "torch/x.yml")
        self.expect("a = 1\nb = 2\n")

    def test_empty_fix_keeps_the_rest_of_the_line(self):
        self.upstream("a = 1; register(f)\n")
        self.ours(rule("register($F)", ""), "torch/x.yml")
        self.expect("a = 1; \n")

    def test_rules_see_the_result_of_the_former_and_definitions_come_last(self):
        self.upstream("f(1)\n")
        self.ours(rule("f($A)", "g($A)") + "---\n" + rule("g($A)", "h($A)", id="b"), "torch/x.yml")
        self.ours("k = g(1)\n")
        self.expect("h(1)\n\n\nk = g(1)\n")

    def test_imports(self):
        self.upstream("import os\n\nf(1)\n")
        self.ours(rule("f($A)", "g($A)", metadata='imports: ["from a import g", "import os"]'), "torch/x.yml")
        self.expect("import os\n\nfrom a import g\n\ng(1)\n")

    def test_constraints_and_transform(self):
        self.upstream("f(aa)\nf(bb)\n")
        self.ours(
            """
            id: t
            language: python
            message: m
            note: n
            rule: {pattern: f($A)}
            constraints: {A: {regex: ^a}}
            transform: {B: {replace: {source: $A, replace: a, by: c}}}
            fix: g($B)
            metadata: {matches: 1, sure: quite}
            """,
            "torch/x.yml",
        )
        self.expect("g(cc)\nf(bb)\n")

    def test_other_releases_are_skipped(self):
        self.upstream("f(1)\n")
        self.ours(rule("f($A)", "g($A)", metadata='releases: ">=2.14"'), "torch/x.yml")
        self.assertEqual(self.patch.plan(self.tree), {})
        self.ours(rule("f($A)", "g($A)", metadata='releases: ">=2.13,<2.15"'), "torch/x.yml")
        self.expect("g(1)\n")

    def test_too_few_and_too_many_matches(self):
        self.upstream("f(1)\nf(2)\n")
        for pattern, matches, found in (("h($A)", 1, 0), ("f($A)", 1, 2), ("f($A)", 3, 2)):
            self.ours(rule(pattern, "g", matches=matches), "torch/x.yml")
            self.refuse(
                f"rule 'a-rule' ({self.root}/torch/x.yml) matches {found} times in torch/x.py of torch 2.13.0+cpu",
                f"expects {matches}",
                "what it finds",
            )

    def test_overlapping_matches(self):
        self.upstream("f(f(1))\n")
        self.ours(rule("f($A)", "g($A)", matches=2), "torch/x.yml")
        self.refuse("a-rule", "overlap")

    def test_upstream_file_is_gone(self):
        self.ours(rule("f($A)", "g($A)"), "torch/gone.yml")
        self.refuse("a-rule", "torch 2.13.0+cpu has no torch/gone.py", "moved")

    def test_result_that_is_not_python(self):
        self.upstream("f(1)\n")
        self.ours(rule("f($A)", "return $A"), "torch/x.yml")
        self.refuse("a-rule", "not valid Python")

    def test_malformed_rules(self):
        self.upstream("f(1)\n")
        good = rule("f($A)", "g($A)")
        for bad, part in (
            ("a: [", "not valid YAML"),
            ("- 1\n", "not a mapping"),
            (good + "severity: hint\n", "unknown keys: severity"),
            (good + "  author: me\n", "unknown keys: author"),
            (good.replace("note: why\n", ""), "lacks note"),
            (good.replace("matches: 1", "sure: no"), "matches"),
            (good.replace("matches: 1", "matches: 0"), "matches"),
            (good.replace("language: python", "language: java"), "language"),
            (good.replace("g($A)", "g($B)"), "$B"),
            (good.replace("  pattern", "  patern"), "ast-grep does not accept it"),
            (good + "  releases: new\n", "releases"),
            (good + "  imports: [x y]\n", "not an import statement"),
            (good + "---\n" + good, "two rules"),
        ):
            with self.subTest(part):
                self.ours(bad, "torch/x.yml")
                self.refuse("torch/x.yml", part)


class TestDefinitions(Case):
    def test_replaces_with_decorators_and_comment(self):
        self.upstream("""
            import functools


            # upstream's reason
            @functools.cache
            def f():
                return 1


            # kept
            def g():
                return 2
        """)
        self.ours('''
            """What the patch does here; not copied."""

            # Our reason.
            @functools.lru_cache(1)
            @functools.wraps(g)
            def f():
                return """
            3"""


            def g():
                return 4
        ''')
        self.expect('''
            import functools


            # Our reason.
            @functools.lru_cache(1)
            @functools.wraps(g)
            def f():
                return """
            3"""


            # kept
            def g():
                return 4
        ''')

    def test_replaces_inside_try(self):
        self.upstream("""
            try:
                from m import f
            except ImportError:

                def f():
                    return 1
        """)
        self.ours('def f():\n    return """\n2"""\n')
        self.expect("""
            try:
                from m import f
            except ImportError:

                def f():
                    return \"\"\"
            2\"\"\"
        """)

    def test_ambiguous_definition(self):
        self.upstream("if a:\n    x = 1\nelse:\n    x = 2\n")
        self.ours("x = 3\n")
        self.refuse("torch/x.py:1", "x is defined 2 times", "lines 2, 4")

    def test_adds_at_the_end(self):
        self.upstream("a = 1\n")
        self.ours("# Header.\n\nX: int = 1\nY = 2\n\n# Why.\nclass C:\n    pass\n\n\nregister(C)\n")
        self.expect("a = 1\n\n\nX: int = 1\nY = 2\n\n\n# Why.\nclass C:\n    pass\n\n\nregister(C)\n")

    def test_before_and_after(self):
        self.upstream("""
            a = 1
            try:
                b = 2
            except E:
                b = 3


            # f's comment
            @dec
            def f():
                pass
        """)
        self.ours("""
            # patch: after a
            a2 = 1

            # patch: after a
            a3 = 1


            # Why it is here.
            # patch: before f
            async def f0():
                pass


            # patch: before b
            b0 = 0
        """)
        self.expect("""
            a = 1
            a2 = 1
            a3 = 1
            b0 = 0


            try:
                b = 2
            except E:
                b = 3


            # Why it is here.
            async def f0():
                pass


            # f's comment
            @dec
            def f():
                pass
        """)

    def test_bad_markers(self):
        self.upstream("a = 1\n")
        for ours, part in (
            ("# patch: before nothing\nb = 1\n", "defines nothing at 0 top-level places"),
            ("# patch: inside a\nb = 1\n", "expected one"),
            ("# patch: after a\n\nb = 1\n", "not directly above"),
            ("# patch: after a\na = 2\n", "remove its '# patch:' line"),
        ):
            with self.subTest(part):
                self.ours(ours)
                self.refuse("torch/x.py:", part)

    def test_statement_that_cannot_be_merged(self):
        self.upstream("a = 1\n")
        self.ours("for i in a:\n    pass\n")
        self.refuse("torch/x.py:1", "For statement")

    def test_defined_twice_by_us(self):
        self.upstream("a = 1\n")
        self.ours("b = 1\nb = 2\n")
        self.refuse("defines b more than once")

    def test_ours_is_not_python(self):
        self.upstream("a = 1\n")
        self.ours("def\n")
        self.refuse("torch/x.py is not valid Python")

    def test_new_file_is_added_whole(self):
        self.ours('"""Header."""\n\nx = 1\n', "torch/new/y.py")
        self.expect('"""Header."""\n\nx = 1\n', "torch/new/y.py")


class TestImports(Case):
    UPSTREAM = """
        # mypy: allow-untyped-defs
        import os
        from typing import Any, TYPE_CHECKING

        import torch
        from torch.a import one, Two
        from torch.b import (
            three,
        )

        from . import config


        if TYPE_CHECKING:
            from torch.t import T


        def f():
            pass
    """

    def merged(self, ours):
        self.upstream(self.UPSTREAM)
        self.ours(ours)
        return self.result() if self.patch.plan(self.tree) else None

    def expect_lines(self, ours, expected):
        """`expected` stands in the result, and only those of its lines that upstream lacks are new."""
        before = text(self.UPSTREAM).split("\n")
        got = self.merged(ours).split("\n")
        self.assertEqual([line for line in got if line not in before], [e for e in expected if e not in before])
        self.assertIn("\n".join(expected), "\n".join(got))

    def test_present_ones_change_nothing(self):
        self.assertIsNone(self.merged("import os\nimport torch\nfrom torch.a import Two\nfrom . import config\n"))

    def test_sorted_position(self):
        self.expect_lines("import abc\n", ["# mypy: allow-untyped-defs", "import abc", "import os"])
        self.expect_lines("import sys\n", ["import os", "import sys", "from typing import Any, TYPE_CHECKING"])
        self.expect_lines("import torch.fx as fx\n", ["import torch", "import torch.fx as fx", "from torch.a import one, Two"])
        self.expect_lines("from torch.c import d\n", [")", "from torch.c import d", "", "from . import config"])
        self.expect_lines("from .x import d\n", ["from . import config", "from .x import d"])

    def test_new_section(self):
        self.expect_lines("import sympy\n", ["", "import sympy", "", "import torch"])

    def test_merges_names(self):
        self.expect_lines("from torch.a import other as o\n", ["from torch.a import one, other as o, Two"])
        self.expect_lines("from torch.b import Four\n", ["from torch.b import (", "    Four,", "    three,", ")"])

    def test_long_line_is_split(self):
        name = "n" * 60
        self.expect_lines(
            f"from torch.a import {name}\n", ["from torch.a import (", f"    {name},", "    one,", "    Two,", ")"]
        )

    def test_type_checking(self):
        self.expect_lines(
            "if TYPE_CHECKING:\n    import ast\n    from torch.t import T, U\n",
            ["if TYPE_CHECKING:", "    import ast", "", "    from torch.t import T, U"],
        )

    def test_module_without_imports(self):
        self.upstream('"""Doc."""\n\nx = 1\n')
        self.ours("import os\n")
        self.expect('"""Doc."""\n\nimport os\n\nx = 1\n')

    def test_future_import(self):
        self.upstream("x = 1\n")
        self.ours("from __future__ import annotations\n")
        self.refuse("would change all of upstream's module")


class TestCheckout(Case):
    CPP = """
        // Upstream.
        #include <ATen/ATen.h>
        #include <torch/csrc/a.h>
        #include <torch/csrc/c.h>

        namespace c10d {
        // Waits.
        at::Tensor wait(const at::Tensor& t) {
          return t;
        }
        } // namespace c10d

        TORCH_LIBRARY(ns, m) {
          m.def("wait(Tensor tensor) -> Tensor");
        }
    """

    def setUp(self):
        super().setUp()
        self.checkout()
        self.upstream(self.CPP, "torch/csrc/F.cpp")

    def test_adds_includes_and_definitions(self):
        self.ours(
            """
            // About the patch.

            #include <ATen/ATen.h>
            #include <torch/csrc/b.h>

            // Why.
            namespace c10d {
            at::Tensor both() { return {}; }
            } // namespace c10d

            TORCH_LIBRARY(ns, m) {}
            """,
            "torch/csrc/F.cpp",
        )
        added = (
            "\n// Why.\nnamespace c10d {\nat::Tensor both() { return {}; }\n} // namespace c10d\n\nTORCH_LIBRARY(ns, m) {}\n"
        )
        expected = text(self.CPP).replace("a.h>\n", "a.h>\n#include <torch/csrc/b.h>\n") + added
        self.assertEqual(self.result("torch/csrc/F.cpp"), expected)

    def test_replaces_the_function_of_the_same_name(self):
        self.ours("namespace c10d {\nat::Tensor wait(const at::Tensor& t) { return {}; }\n}\n", "torch/csrc/F.cpp")
        expected = text(self.CPP).replace("{\n  return t;\n}", "{ return {}; }")
        self.assertEqual(self.result("torch/csrc/F.cpp"), expected)

    def test_replaces_one_and_appends_the_other(self):
        self.ours(
            "namespace c10d {\nint a() { return 1; }\n\nat::Tensor wait(int t) { return {}; }\n\nint b() { return 1; }\n}\n",
            "torch/csrc/F.cpp",
        )
        got = self.result("torch/csrc/F.cpp")
        self.assertIn("// Waits.\nat::Tensor wait(int t) { return {}; }\n} // namespace c10d", got)
        self.assertTrue(got.endswith("namespace c10d {\nint a() { return 1; }\n\nint b() { return 1; }\n}\n"), got)

    def test_rule(self):
        self.ours(
            rule('m.def("wait(Tensor tensor) -> Tensor");', 'm.def("x");', language="cpp"), "torch/csrc/F.yml"
        )
        self.assertIn('{\n  m.def("x");\n}', self.result("torch/csrc/F.cpp"))

    def test_a_wheel_skips_cpp_and_tests(self):
        self.ours("int x;\n", "torch/csrc/F.cpp")
        self.ours(rule("nothing($A)", "g", language="cpp"), "torch/csrc/F.yml")
        self.ours("x = 1\n", "test/test_x.py")
        shutil.rmtree(self.tree)
        self.put(self.tree, "torch/version.py", "__version__ = '2.13.0'\n")
        (self.tree / "torch/lib").mkdir()
        self.assertEqual(self.patch.plan(self.tree), {})

    def test_tests(self):
        self.upstream("import os\n\n\nif __name__ == '__main__':\n    run_tests()\n", "test/test_a.py")
        self.ours("def g():\n    pass\n\n\nif __name__ == '__main__':\n    run_tests()\n", "test/test_a.py")
        self.ours("import os\n", "test/sub/test_b.py")
        self.put(self.root, "test/archive.pt2", bytes(range(256)))
        self.ours("x = 1\n", "test/tools/test_tool.py")
        plan = self.patch.plan(self.tree)
        self.assertEqual(set(plan), {"test/test_a.py", "test/sub/test_b.py", "test/archive.pt2"})
        self.expect(
            "import os\n\n\ndef g():\n    pass\n\n\nif __name__ == '__main__':\n    run_tests()\n", "test/test_a.py"
        )

    def test_wheel_shim_is_for_wheels(self):
        self.ours("x = 1\n", "tools/wheel_shim/torch/_x.py")
        self.assertEqual(self.patch.plan(self.tree), {})
        shutil.rmtree(self.tree)
        self.put(self.tree, "torch/version.py", "__version__ = '2.13.0'\n")
        (self.tree / "torch/lib").mkdir()
        for roots in ([self.root], [self.root, self.root / "tools/wheel_shim"]):
            self.assertEqual(list(Patch(roots).plan(self.tree)), ["torch/_x.py"])


class TestTree(Case):
    """What apply and revert do to the files of a tree."""

    def setUp(self):
        super().setUp()
        self.upstream("a = 1\n").chmod(0o640)
        self.upstream("b = f(1)\n", "torch/y.py")
        self.upstream("z = 1\n", "torch/z.py")
        self.ours("a = 2\n")
        self.ours(rule("f($A)", "g($A)"), "torch/y.yml")
        self.ours("new = 1\n", "torch/new/deep/n.py")
        self.x, self.y, self.n = (self.tree / "torch" / p for p in ("x.py", "y.py", "new/deep/n.py"))

    def test_apply_then_apply_then_revert(self):
        before = self.contents()
        result = self.patch.apply(self.tree)
        self.assertEqual(result.changed, ["torch/x.py", "torch/y.py"])
        self.assertEqual(result.added, ["torch/new/deep/n.py"])
        self.assertEqual((self.x.read_text(), self.y.read_text()), ("a = 2\n", "b = g(1)\n"))
        self.assertEqual(self.x.stat().st_mode & 0o7777, 0o640)
        self.assertEqual((self.tree / ".semantic_patch/.gitignore").read_text(), "*\n")
        applied = self.snapshot()
        again = self.patch.apply(self.tree)
        self.assertFalse(again.wrote)
        self.assertEqual(again.unchanged, ["torch/new/deep/n.py", "torch/x.py", "torch/y.py"])
        self.assertEqual(self.snapshot(), applied)
        result = self.patch.revert(self.tree)
        self.assertEqual((result.restored, result.removed), (["torch/x.py", "torch/y.py"], ["torch/new/deep/n.py"]))
        self.assertEqual(self.contents(), before)
        self.assertFalse(self.patch.revert(self.tree).wrote)
        self.assertEqual(self.contents(), before)

    def test_mode_is_restored(self):
        self.patch.apply(self.tree)
        self.x.chmod(0o600)
        self.patch.revert(self.tree)
        self.assertEqual(self.x.stat().st_mode & 0o7777, 0o640)

    def test_stock_tree_that_shares_inodes_is_untouched(self):
        stock = self.tmp / "stock"
        shutil.copytree(self.tree, stock, copy_function=os.link)
        before = self.snapshot(stock)
        self.patch.apply(self.tree)
        self.assertEqual(self.snapshot(stock), before)
        self.patch.revert(self.tree)
        self.assertEqual(self.snapshot(stock), before)

    def test_linked_directory_is_refused(self):
        stock = self.tmp / "stock"
        self.tree.rename(stock)
        self.tree.mkdir()
        (self.tree / "torch").symlink_to(stock / "torch")
        before = self.snapshot(stock)
        self.refuse("symbolic link")
        self.assertEqual(self.snapshot(stock), before)

    def test_stale_bytecode_is_removed(self):
        stale = self.put(self.tree, "torch/__pycache__/x.cpython-311.pyc", b"old")
        other = self.put(self.tree, "torch/__pycache__/z.cpython-311.pyc", b"old")
        self.patch.apply(self.tree)
        self.assertFalse(stale.exists())
        self.assertTrue(other.exists())

    def test_bytecode_of_an_added_file_does_not_keep_its_directory(self):
        self.patch.apply(self.tree)
        self.put(self.tree, "torch/new/deep/__pycache__/n.cpython-311.pyc", b"")
        self.patch.revert(self.tree)
        self.assertFalse((self.tree / "torch/new").exists())

    def test_changed_patch_rewrites_what_differs(self):
        before = self.contents()
        self.patch.apply(self.tree)
        kept = self.y.stat()
        self.ours("a = 3\n")
        self.assertEqual(self.patch.status(self.tree).code, 3)
        self.assertEqual(self.patch.apply(self.tree).changed, ["torch/x.py"])
        self.assertEqual(self.x.read_text(), "a = 3\n")
        self.assertEqual((self.y.stat().st_ino, self.y.stat().st_mtime_ns), (kept.st_ino, kept.st_mtime_ns))
        (self.root / "torch/y.yml").unlink()
        (self.root / "torch/new/deep/n.py").unlink()
        result = self.patch.apply(self.tree)
        self.assertEqual((result.restored, result.removed), (["torch/y.py"], ["torch/new/deep/n.py"]))
        self.assertFalse((self.tree / "torch/new").exists())
        self.assertEqual(self.patch.status(self.tree).code, 0)
        self.patch.revert(self.tree)
        self.assertEqual(self.contents(), before)

    def test_comment_only_change_brings_status_up_to_date(self):
        self.patch.apply(self.tree)
        self.ours("# About.\n\na = 2\n")
        self.assertEqual(self.patch.status(self.tree).code, 3)
        self.assertFalse(self.patch.apply(self.tree).wrote)
        self.assertEqual(self.patch.status(self.tree).code, 0)

    def test_patch_may_change_the_version_file(self):
        self.ours("__version__ = '2.13.0+other'\n", "torch/version.py")
        self.patch.apply(self.tree)
        applied = self.snapshot()
        self.patch.apply(self.tree)
        self.assertEqual(self.snapshot(), applied)

    def test_changed_by_hand(self):
        self.patch.apply(self.tree)
        self.x.write_text("a = 99\n")
        self.assertEqual(
            (self.patch.status(self.tree).code, self.patch.status(self.tree).text), (4, "changed by hand: torch/x.py")
        )
        self.refuse("changed by hand", "torch/x.py")
        self.refuse("changed by hand", "torch/x.py", call=lambda: self.patch.revert(self.tree))
        # What the message advises.
        self.x.write_bytes((self.tree / ".semantic_patch/originals/torch/x.py").read_bytes())
        self.patch.revert(self.tree)
        self.assertEqual(self.x.read_text(), "a = 1\n")

    def test_added_file_removed_by_hand(self):
        self.patch.apply(self.tree)
        self.n.unlink()
        self.refuse("torch/new/deep/n.py")
        self.patch.revert(self.tree)

    def fail_each_write(self, prepare, call):
        """Let each write that `call` does fail in turn; after each failure the tree is as it was."""
        for owner, name, error in (
            (os, "replace", errno.EACCES),
            (Path, "write_bytes", errno.ENOSPC),
            (Path, "write_text", errno.ENOSPC),
            (Path, "mkdir", errno.EROFS),
        ):
            function, failures = getattr(owner, name), 0
            while True:
                prepare()
                before = self.snapshot()
                remaining = [failures]

                def failing(*args, **kwargs):
                    remaining[0] -= 1
                    if remaining[0] == -1:
                        raise OSError(error, os.strerror(error), str(args[0]))
                    return function(*args, **kwargs)

                try:
                    with mock.patch.object(owner, name, failing):
                        call()
                    break
                except PatchError as e:
                    failures += 1
                    self.assertIn(os.strerror(error), str(e))
                    if "half-applied" in str(e):  # all was written, but that could not be recorded
                        self.assertEqual(self.patch.status(self.tree).code, 5)
                        continue
                    self.assertIn("nothing was changed", str(e))
                after = self.snapshot()
                for path in set(before) | set(after):
                    if "/.semantic_patch/" not in path:
                        self.assertEqual(after.get(path), before.get(path), (name, failures))
                manifest = str(self.tree / ".semantic_patch/manifest.json")
                self.assertEqual(after.get(manifest, [None])[0], before.get(manifest, [None])[0])
            yield name, failures

    def test_failed_apply_is_rolled_back(self):
        failures = dict(self.fail_each_write(lambda: self.patch.revert(self.tree), lambda: self.patch.apply(self.tree)))
        # Three files and three manifests; three files and two originals.
        self.assertEqual((failures["replace"], failures["write_bytes"]), (6, 5))

    def test_failed_reapply_is_rolled_back(self):
        def prepare():
            self.patch.revert(self.tree)
            self.ours("a = 2\n")
            (self.root / "torch/other.py").unlink(missing_ok=True)
            self.ours("new = 1\n", "torch/new/deep/n.py")
            self.patch.apply(self.tree)
            self.ours("a = 3\n")
            self.ours("other = 1\n", "torch/other.py")
            (self.root / "torch/new/deep/n.py").unlink()

        failures = dict(self.fail_each_write(prepare, lambda: self.patch.apply(self.tree)))
        self.assertGreater(failures["replace"], 3)

    def test_failed_revert_is_rolled_back(self):
        failures = dict(self.fail_each_write(lambda: self.patch.apply(self.tree), lambda: self.patch.revert(self.tree)))
        self.assertGreater(failures["replace"], 2)

    def test_filesystem_without_hard_links(self):
        before = self.contents()
        with mock.patch.object(os, "link", side_effect=PermissionError(errno.EPERM, "no links")):
            self.patch.apply(self.tree)
            self.patch.revert(self.tree)
        self.assertEqual(self.contents(), before)

    def test_disk_is_full(self):
        usage = namedtuple("usage", "total used free")(10, 9, 1)
        with mock.patch.object(shutil, "disk_usage", lambda _: usage):
            self.refuse("no space", "bytes are needed")

    def test_failed_rollback_is_reported_and_revert_repairs_it(self):
        before = self.contents()
        replace = os.replace

        def failing(source, target):
            if Path(target) == self.y or "-old" in str(source):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            replace(source, target)

        with mock.patch.object(os, "replace", failing), self.assertRaisesRegex(PatchError, "half-applied"):
            self.patch.apply(self.tree)
        self.assertEqual(self.patch.status(self.tree).code, 5)
        self.patch.revert(self.tree)
        self.assertEqual(self.contents(), before)

    def test_killed_midway(self):
        before = self.contents()
        for count in range(1, 8):
            script = text(f"""
                import os, sys
                from pathlib import Path
                from tools.semantic_patch import Patch
                replace, left = os.replace, [{count}]
                def killed(source, target):
                    left[0] -= 1
                    if not left[0]:
                        os._exit(9)
                    replace(source, target)
                os.replace = killed
                Patch([Path({str(self.root)!r})]).apply(Path({str(self.tree)!r}))
            """)
            code = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode
            if code == 0:
                break
            self.assertEqual(code, 9)
            if self.patch.status(self.tree).code == 5:
                self.refuse("half-applied", "revert")
            self.patch.revert(self.tree)
            self.assertEqual(self.contents(), before)
        self.assertGreater(count, 4)

    def test_two_at_once(self):
        fd = os.open(self.tree, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self.refuse("another semantic_patch is at work")

    def test_damaged_manifest(self):
        self.patch.apply(self.tree)
        (self.tree / ".semantic_patch/manifest.json").write_text("{")
        self.refuse("manifest.json cannot be read")

    def test_damaged_original(self):
        self.patch.apply(self.tree)
        (self.tree / ".semantic_patch/originals/torch/x.py").write_text("?")
        self.refuse("missing or damaged", call=lambda: self.patch.revert(self.tree))


class TestRefusals(Case):
    def test_no_tree(self):
        with self.assertRaisesRegex(PatchError, "does not exist"):
            self.patch.apply(self.tmp / "nowhere")

    def test_not_pytorch(self):
        shutil.rmtree(self.tree / "torch")
        self.refuse("is not a PyTorch tree", "contains torch/")

    def test_no_version(self):
        self.upstream("x = 1\n", "torch/version.py")
        self.refuse("is not a PyTorch tree", "states no version")

    def test_releases(self):
        for version in ("2.12.1+cpu", "2.13.1", "2.14.0a0+git123"):
            self.upstream(f"__version__ = '{version}'\n", "torch/version.py")
            self.refuse(version, "supports torch 2.13.0")
        for version in ("2.13.0", "2.13.0+cu130", "2.13.0a0+git1"):
            self.upstream(f"__version__ = '{version}'\n", "torch/version.py")
            self.patch.plan(self.tree)

    def test_crlf(self):
        self.put(self.tree, "torch/x.py", b"a = 1\r\n")
        self.ours("a = 2\n")
        self.refuse("torch/x.py", "CRLF")

    def test_not_utf8(self):
        self.put(self.tree, "torch/x.py", b"a = '\xff'\n")
        self.ours("a = 2\n")
        self.refuse("torch/x.py", "UTF-8")

    def test_unknown_kind_of_file(self):
        self.ours("x\n", "torch/x.pyi")
        self.refuse("x.pyi", ".py, .yml and C++")

    def test_missing_packages(self):
        self.upstream("f(1)\n")
        self.ours(rule("f($A)", "g($A)"), "torch/x.yml")
        for module, name in (("yaml", "PyYAML"), ("ast_grep_py", "ast-grep-py")):
            with mock.patch.dict(sys.modules, {module: None}):
                self.refuse(f"pip install {name}")


class TestDiff(Case):
    def git(self, *args):
        return subprocess.run(["git", *args], cwd=self.tree, check=True, capture_output=True)

    def test_git_applies_it_to_the_same_bytes(self):
        self.checkout()
        self.upstream("a = 1\nb = 2")
        self.upstream("b = f(1)  # é\x0c\n", "torch/y.py")
        self.ours("a = 2\n")
        self.ours(rule("f($A)", "g($A)"), "torch/y.yml")
        self.ours("new = 1", "torch/new.py")
        self.put(self.root, "torch/empty.py", "")
        self.put(self.root, "test/archive.pt2", os.urandom(300))
        self.git("init", "-q")
        before = self.contents()
        diff = self.patch.diff(self.tree)
        self.assertEqual(self.contents(), before)
        (self.tmp / "p.diff").write_text(diff)
        self.git("apply", "--check", str(self.tmp / "p.diff"))
        self.patch.apply(self.tree)
        self.assertEqual(self.patch.diff(self.tree), diff)
        applied = {rel: (self.tree / rel).read_bytes() for rel in self.patch.plan(self.tree)}
        self.assertEqual(len(applied), 5)
        status = self.git("status", "--porcelain", "--untracked-files=all").stdout.decode()
        self.assertNotIn(".semantic_patch", status)
        self.patch.revert(self.tree)
        self.git("apply", str(self.tmp / "p.diff"))
        self.assertEqual({rel: (self.tree / rel).read_bytes() for rel in applied}, applied)


class TestCommandLine(Case):
    def run_cli(self, *args):
        out = subprocess.run(
            [sys.executable, "-m", "tools.semantic_patch", *args, "--root", str(self.root)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        return out.returncode, out.stdout, out.stderr

    def call(self, *args):
        """The same without a new process."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([*args, "--root", str(self.root)])
        return code, out.getvalue(), err.getvalue()

    def test_end_to_end(self):
        self.upstream("a = 1\n")
        self.ours("a = 2\n")
        tree = str(self.tree)
        self.assertEqual(self.run_cli("status", tree), (0, "not applied\n", ""))
        code, out, err = self.run_cli("diff", tree)
        self.assertEqual((code, err), (0, ""))
        self.assertIn("--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n", out)
        code, out, err = self.run_cli("apply", tree)
        self.assertEqual((code, err), (0, ""))
        self.assertIn("changed torch/x.py\n", out)
        self.assertIn("make build", out)
        self.assertIn("nothing to do", self.call("apply", tree)[1])
        self.assertEqual(self.call("status", tree), (0, "applied and current (1 files, torch 2.13.0+cpu)\n", ""))
        self.ours("a = 3\n")
        self.assertEqual(self.call("status", tree)[0], 3)
        self.upstream("a = 9\n")
        self.assertEqual(self.call("status", tree)[0], 4)
        code, _, err = self.run_cli("apply", tree)
        self.assertEqual(code, 1)
        self.assertRegex(err, r"^semantic_patch: error: changed by hand .*\n$")
        self.upstream("a = 2\n")
        self.assertEqual(self.run_cli("revert", tree), (0, "restored torch/x.py\n", ""))
        self.assertEqual(self.call("revert", tree), (0, "nothing to do: not applied\n", ""))

    def test_usage(self):
        self.assertEqual(self.run_cli("frobnicate", "x")[0], 2)
        code, out, _ = self.run_cli("--help")
        self.assertEqual(code, 0)
        self.assertIn("exit codes:", out)

    def test_this_repositorys_patch_reads(self):
        Patch([REPOSITORY])
        self.assertEqual(tree_module.SUPPORTED, "==2.13.0")


if __name__ == "__main__":
    unittest.main()
