"""docs/call_sites.md names every place in the base release that knows wait_tensor."""

import re
import unittest
from importlib.metadata import distribution
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(?P<file>torch/[^`]+\.py)` \| (?P<lines>\d+) \|", re.M)


class TestCallSites(unittest.TestCase):
    maxDiff = None

    def test_every_occurrence_is_listed(self):
        # The metadata is the stock torch's, also where the patched one is imported.
        site = Path(str(distribution("torch").locate_file("")))
        found = {}
        for path in sorted((site / "torch").rglob("*.py")):
            lines = path.read_text(encoding="utf-8").split("\n")
            if n := sum("wait_tensor" in line for line in lines):
                found[path.relative_to(site).as_posix()] = n
        listed = {
            m["file"]: int(m["lines"])
            for m in ROW.finditer((ROOT / "docs" / "call_sites.md").read_text())
        }
        self.assertEqual(listed, found)

    def test_every_test_named_exists(self):
        text = (ROOT / "docs" / "call_sites.md").read_text()
        files = {
            "effects": "test/inductor/test_wait_tensor_effects.py",
            "passes": "test/inductor/test_wait_tensor_passes.py",
        }
        for file, names in re.findall(r"(effects|passes) ((?:`Test[\w.]+`(?:, )?)+)", text):
            source = (ROOT / files[file]).read_text()
            for name in re.findall(r"`(Test[\w.]+)`", names):
                kind, _, test = name.partition(".")
                self.assertRegex(source, rf"class {kind}\(")
                self.assertIn(f"def {test}", source)


if __name__ == "__main__":
    unittest.main()
