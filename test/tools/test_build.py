# Owner(s): ["oncall: distributed"]
"""setup.py: what a build does, what it need not do again, what it refuses, and that stock torch stays as it was."""

import base64
import contextlib
import csv
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest


REPOSITORY = Path(__file__).resolve().parents[2]
SETUP = REPOSITORY / "setup.py"
sys.path.insert(0, str(REPOSITORY))

from tools.semantic_patch import Patch, PatchError  # noqa: E402


spec = importlib.util.spec_from_file_location("setup_under_test", SETUP)
setup = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Writes what it is given as sources into its output, and a line for each call into $CALLS.
FAKE_CXX = """\
#!/bin/sh
[ "$1" = --version ] && exec echo "fake $VERSION"
echo "$@" >> "$CALLS"
inputs=
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=$2 ;;
    *.cpp|*.o) inputs="$inputs $1" ;;
  esac
  shift
done
cat $inputs > "$out"
grep -q BROKEN "$out" && { echo "error: that is no C++" >&2; exit 1; }
exit 0
"""


def environment(**changes):
    """This process's environment, but stock: without what makes it run patched."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | changes


def run(*command, check=True, **kwargs):
    kwargs.setdefault("env", environment())
    kwargs.setdefault("cwd", REPOSITORY)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **kwargs)
    if check and done.returncode:
        raise AssertionError(f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def snapshot(tree):
    """Each file's content, inode and times: equal only if nothing was written."""
    return {
        str(p.relative_to(tree)): (p.read_bytes(), s.st_ino, s.st_mtime_ns, s.st_mode)
        for p in sorted(tree.rglob("*"))
        if p.is_file() and (s := p.stat())
    }


class Case(unittest.TestCase):
    """A small torch, a small patch of it, and a compiler that takes no time."""

    maxDiff = None

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.tmp = Path(directory.name).resolve()
        self.site, self.root, self.out = self.tmp / "site", self.tmp / "patch", self.tmp / "build"
        self.lib = self.out / "lib"
        self.library = self.lib / f"torch/lib/libtorch_wait_tensor-{COMMIT[:12]}.so"
        self.calls = self.put(self.tmp, "calls", "")
        cxx = self.put(self.tmp, "cxx", FAKE_CXX)
        cxx.chmod(0o755)
        environ = environment(CXX=str(cxx), CALLS=str(self.calls), VERSION="1")
        environ.pop("CXXFLAGS", None)
        patcher = mock.patch.dict(os.environ, environ, clear=True)
        patcher.start()
        self.addCleanup(patcher.stop)

        self.install()
        shutil.copytree(REPOSITORY / "tools/wheel_shim/torch", self.root / "torch")
        self.put(self.root, "torch/ops.py", "def wait():\n    return 'patched'\n")
        self.sources = [self.put(self.root, "shim.cpp", "shim\n"), self.put(self.root, "kernels.cpp", "kernels\n")]

    def put(self, base, rel, content):
        path = base / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def install(self, version="2.13.0+cpu", **more):
        """A stock torch in self.site, as an installer leaves it."""
        shutil.rmtree(self.site, ignore_errors=True)
        info = f"torch-{version}.dist-info"
        files = {
            "torch/version.py": f"__version__ = '{version}'\ngit_version = '{COMMIT}'\n",
            "torch/__init__.py": "from torch import _C as _C\n",
            "torch/ops.py": "def wait():\n    return 'stock'\n",
            "torch/lib/libtorch_cpu.so": "",
            "torchgen/__init__.py": "",
            "torch/__pycache__/ops.cpython-311.pyc": "bytecode",
            f"{info}/METADATA": f"Metadata-Version: 2.4\nName: torch\nVersion: {version}\n\nVersion: 1 of the text\n",
            f"{info}/entry_points.txt": "[console_scripts]\ntorchrun = torch.run:main\n",
            f"{info}/licenses/LICENSE": "BSD",
            f"{info}/INSTALLER": "pip",
            **more,
        }
        lines = [f"../bin/torchrun,,\n{info}/RECORD,,\n"]
        for rel, content in files.items():
            self.put(self.site, rel, content)
            digest = "" if rel.endswith(".pyc") else f"sha256={hashlib.sha256(content.encode()).hexdigest()}"
            lines.append(f"{rel},{digest},{len(content)}\n")
        self.put(self.site, f"{info}/RECORD", "".join(lines))
        self.info = self.site / info

    @property
    def base(self):
        return setup.find_base([str(self.site)])

    def build(self):
        """What a build printed; "" if it found nothing to do."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            self.did_something = setup.build(self.base, Patch([self.root]), self.sources, self.out)
        self.assertEqual(self.did_something, bool(out.getvalue()))
        return out.getvalue()

    def refused(self, pattern, error=setup.BuildError):
        """A build fails with a message that says so, and nothing it failed in has changed."""
        site, lib = snapshot(self.site), snapshot(self.lib)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            with self.assertRaisesRegex(error, pattern):
                setup.build(self.base, Patch([self.root]), self.sources, self.out)
        self.assertEqual(snapshot(self.site), site)
        self.assertEqual(snapshot(self.lib), lib)
        self.assertEqual([p.name for p in self.out.glob("lib.*")], [])
        return out.getvalue()

    def compiled(self):
        """The sources that were compiled since the last call."""
        lines = self.calls.read_text().splitlines()
        self.calls.write_text("")
        return sorted(Path(word).name for line in lines for word in line.split() if word.endswith(".cpp"))


class BuildTest(Case):
    def test_makes_a_patched_tree_and_leaves_stock_as_it_was(self):
        before = snapshot(self.site)
        self.assertRegex(self.build(), r"(?s)stage .* s\n.*compile shim.cpp, kernels.cpp .* s\napply the patch .* s\n")
        self.assertEqual(snapshot(self.site), before)
        self.assertEqual((self.lib / "torch/ops.py").read_text(), "def wait():\n    return 'patched'\n")
        self.assertIn("'2.13.0+cpu.issue126773'", (self.lib / "torch/version.py").read_text())
        self.assertEqual(self.library.read_text(), "shim\nkernels\n")  # in link order
        self.assertTrue((self.lib / "torchgen/__init__.py").samefile(self.site / "torchgen/__init__.py"))
        # The bytecode of a file that changed is gone; there is no metadata that pip could take for an install.
        self.assertFalse((self.lib / "torch/__pycache__/ops.cpython-311.pyc").exists())
        self.assertEqual(list(self.lib.glob("*.dist-info")), [])

    def test_library_is_named_as_the_patched_torch_looks_for_it(self):
        loader = (REPOSITORY / "tools/wheel_shim/torch/_wait_tensor_library.py").read_text()
        (name,) = re.findall(r"_NAME = (f.*)", loader)
        name = eval(name, {"git_version": COMMIT})
        self.assertEqual(self.base.library, f"torch/lib/{name}")

    def test_second_build_does_nothing(self):
        self.build()
        before = snapshot(self.out)
        self.assertEqual(self.build(), "")
        self.assertEqual(snapshot(self.out), before)

    def test_edit_of_a_patch_file_compiles_nothing(self):
        self.build()
        self.compiled()
        self.put(self.root, "torch/ops.py", "def wait():\n    return 'again'\n")
        self.assertNotRegex(self.build(), "stage|compile")
        self.assertIn("again", (self.lib / "torch/ops.py").read_text())
        self.assertEqual(self.compiled(), [])

    def test_edit_of_a_source_compiles_that_source(self):
        self.build()
        self.assertEqual(self.compiled(), ["kernels.cpp", "shim.cpp"])
        self.sources[1].write_text("better kernels\n")
        self.assertNotIn("stage", self.build())
        self.assertEqual(self.compiled(), ["kernels.cpp"])
        self.assertEqual(self.library.read_text(), "shim\nbetter kernels\n")
        self.assertEqual(len(list((self.out / "temp").iterdir())), 3)

    def test_compiles_again_for_other_flags_or_another_compiler(self):
        self.build()
        for change in ({"CXXFLAGS": "-O0 -g"}, {"VERSION": "2"}):
            self.compiled()
            with mock.patch.dict(os.environ, change):
                self.build()
            self.assertEqual(self.compiled(), ["kernels.cpp", "shim.cpp"], change)

    def test_cxx_may_have_arguments_and_cxxflags_come_last(self):
        with mock.patch.dict(os.environ, {"CXX": f"env {os.environ['CXX']}", "CXXFLAGS": "-O0"}):
            self.build()
        self.assertRegex(self.calls.read_text(), f'-O2 .*-DWAIT_TENSOR_TORCH_COMMIT="{COMMIT}" -O0 ')

    def test_another_base_is_staged_afresh(self):
        self.build()
        self.install(**{"torch/new.py": "new = 1\n"})
        self.assertIn("stage", self.build())
        self.assertTrue((self.lib / "torch/new.py").exists())
        self.assertEqual([p.name for p in self.out.glob("lib*")], ["lib"])

    def test_the_same_wheel_installed_elsewhere_is_the_same_base(self):
        self.build()
        self.site = self.site.rename(self.tmp / "elsewhere")
        with open(self.site / self.info.name / "RECORD", "a") as f:
            f.write("torch/__pycache__/version.cpython-311.pyc,,\n")
        self.assertEqual(self.build(), "")

    def test_stage_copies_where_it_cannot_link(self):
        with mock.patch("os.link", side_effect=OSError(18, "Invalid cross-device link")):
            self.build()
        self.assertEqual((self.lib / "torch/ops.py").read_text(), "def wait():\n    return 'patched'\n")
        self.assertFalse((self.lib / "torchgen/__init__.py").samefile(self.site / "torchgen/__init__.py"))

    def test_interrupted_stage_is_redone(self):
        self.put(self.out, "lib.new/torch/half.py", "")
        self.build()
        self.assertFalse((self.lib / "torch/half.py").exists())
        self.assertTrue((self.lib / "torch/ops.py").exists())

    def test_half_applied_or_damaged_tree_is_staged_afresh(self):
        for damage in (
            lambda m: m.write_text(m.read_text().replace('"applied"', '"applying"')),
            lambda m: m.write_text("{"),
            lambda m: (self.lib / "torch/version.py").unlink(),
            lambda m: (self.lib / setup.STAMP).unlink(),
        ):
            self.build()
            damage(self.lib / ".semantic_patch/manifest.json")
            self.assertIn("stage", self.build())
            self.assertEqual(self.build(), "")

    def test_lost_library_is_put_back(self):
        self.build()
        self.library.unlink()
        self.assertNotRegex(self.build(), "stage|compile")
        self.assertEqual(self.library.read_text(), "shim\nkernels\n")

    def test_libraries_beside_torch_stay_in_reach(self):
        self.install(**{"torch/lib/libtorch_global_deps.so": "\0$ORIGIN/../../nvidia/cublas/lib:$ORIGIN/../../gone\0"})
        (self.site / "nvidia/cublas/lib").mkdir(parents=True)
        self.build()
        self.assertTrue((self.lib / "torch/lib/../../nvidia/cublas/lib").is_dir())
        self.assertFalse((self.lib / "gone").is_symlink())

    def test_two_builds_take_turns(self):
        self.build()
        self.put(self.root, "torch/ops.py", "def wait():\n    return 'again'\n")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            with setup.locked(self.out):
                second = threading.Thread(
                    target=setup.build, args=(self.base, Patch([self.root]), self.sources, self.out)
                )
                second.start()
                second.join(0.3)
                self.assertTrue(second.is_alive())
                self.assertIn("'patched'", (self.lib / "torch/ops.py").read_text())
            second.join(30)
        self.assertIn(f"wait for another build in {self.out}", out.getvalue())
        self.assertIn("'again'", (self.lib / "torch/ops.py").read_text())

    def test_metadata_is_the_base_s_own_under_the_patched_version(self):
        info = self.tmp / "torch-2.13.0+cpu.issue126773.dist-info"
        setup.write_info(self.base, setup.patched_version(self.base), info)
        self.assertEqual(
            (info / "METADATA").read_text(),
            "Metadata-Version: 2.4\nName: torch\nVersion: 2.13.0+cpu.issue126773\n\nVersion: 1 of the text\n",
        )
        self.assertEqual(
            sorted(str(p.relative_to(info)) for p in info.rglob("*") if p.is_file()),
            ["METADATA", "entry_points.txt", "licenses/LICENSE"],
        )


class RefusalTest(Case):
    def test_no_torch(self):
        with self.assertRaisesRegex(
            setup.BuildError, r"no torch is installed for .*make build.*pip install torch==2\.13"
        ):
            setup.find_base([str(self.tmp / "empty")])

    def test_what_was_built_here_is_no_base(self):
        site = self.site.rename(self.tmp / "lib")
        with mock.patch.object(setup, "BUILD", self.tmp), self.assertRaisesRegex(setup.BuildError, "no torch is"):
            setup.find_base([str(site)])

    def test_another_version(self):
        self.install("2.12.1+cpu")
        self.refused(r"is torch 2\.12\.1\+cpu; this patch supports torch 2\.13\.0 only.*pip install .*torch==2\.13\.0")

    def test_a_patched_base(self):
        self.put(self.site, "torch/lib/libtorch_wait_tensor-0123456789ab.so", "")
        self.refused("is a patched one already.*--force-reinstall --no-deps torch==2.13.0")

    def test_a_base_patched_where_it_lies(self):
        Patch([self.root]).apply(self.site)
        self.refused(f"semantic_patch revert {self.site}")

    def test_not_from_a_wheel(self):
        (self.info / "RECORD").unlink()
        self.refused("was not installed from a wheel.*semantic_patch apply CHECKOUT")

    def test_damaged_base(self):
        (self.site / "torch/ops.py").unlink()
        self.refused(r"lacks its own torch/ops.py; install it afresh")

    def test_files_outside_the_packages(self):
        with open(self.info / "RECORD", "a") as f:
            f.write("../../share/man/torch.1,,\n")
        self.refused("owns ../../share/man/torch.1")

    def test_no_compiler(self):
        for present in (False, True):
            if present:
                self.build()
            with mock.patch.dict(os.environ, {"CXX": "no-such-g++"}):
                self.refused(r"no C\+\+ compiler 'no-such-g\+\+'.*apt-get install g\+\+.*CXX")

    def test_no_default_compiler(self):
        with mock.patch.dict(os.environ, {"CXX": "", "PATH": str(self.tmp / "empty")}):
            self.refused(r"no C\+\+ compiler 'g\+\+'")

    def test_compiler_error_on_a_fresh_build(self):
        self.sources[1].write_text("BROKEN\n")
        output = self.refused(r"compiler failed \(exit 1\).*The command was: .*kernels.cpp.*g\+\+ 11 or newer")
        self.assertIn("error: that is no C++", output)
        self.assertFalse(self.lib.exists())
        self.assertEqual([p.suffix for p in (self.out / "temp").iterdir()], [".o"])

    def test_compiler_error_leaves_the_last_good_build(self):
        self.build()
        self.sources[1].write_text("BROKEN\n")
        self.put(self.root, "torch/ops.py", "def wait():\n    return 'newer than its library'\n")
        self.refused("compiler failed")
        self.assertEqual(self.library.read_text(), "shim\nkernels\n")
        self.sources[1].write_text("kernels\n")
        self.assertNotIn("compile", self.build())

    def test_compiler_killed(self):
        self.put(self.tmp, "cxx", "#!/bin/sh\nkill -9 $$\n")
        self.refused("killed by signal 9: memory")

    def test_compiler_without_cxx20(self):
        self.put(self.tmp, "cxx", "#!/bin/sh\necho \"unrecognized command-line option '-std=c++20'\" >&2\nexit 1\n")
        self.assertIn("unrecognized", self.refused(r"needs C\+\+20: g\+\+ 11 or newer"))

    def test_patch_error_comes_before_the_compiler(self):
        rule = (self.root / "torch/version.yml").read_text()
        for present in (False, True):
            if present:
                self.build()
                self.sources[1].write_text("better kernels\n")
            self.put(self.root, "torch/version.yml", rule.replace("__version__ = $VERSION", "nothing = $VERSION"))
            self.compiled()
            self.refused("version-says-patched", PatchError)
            self.assertEqual(self.compiled(), [])
            self.put(self.root, "torch/version.yml", rule)

    def test_hand_change_is_kept(self):
        self.build()
        (self.lib / "torch/ops.py").unlink()
        self.put(self.lib, "torch/ops.py", "mine = 1\n")
        self.refused("changed by hand.*torch/ops.py", PatchError)

    def test_no_space(self):
        usage = SimpleNamespace(total=0, used=0, free=10)
        no_link = mock.patch("os.link", side_effect=OSError(18, "Invalid cross-device link"))
        self.install(**{"torch/lib/big.so": "x" * 10**6})
        with mock.patch("shutil.disk_usage", return_value=usage):
            with no_link:
                self.refused("no space in .*lib.new: 1 MB are needed")
            self.refused("no space in .*temp: 20 MB are needed")

    def test_disk_fills_up(self):
        with mock.patch.object(Path, "rename", side_effect=OSError(28, "No space left on device")):
            self.refused("no space left on the disk")

    def test_platform(self):
        with mock.patch("platform.machine", return_value="riscv64"):
            self.refused("Linux x86-64 and aarch64 only; here is Linux riscv64")


class CommandTest(Case):
    """setup.py as it is run: one message, exit code 1, no traceback."""

    def setup_py(self, *args, **env):
        return run(sys.executable, SETUP, *args, env=environment(**env), check=False)

    def assertFails(self, done, pattern):
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertRegex(done.stderr, rf"^setup.py: error: .*{pattern}")

    def test_error_of_the_base(self):
        self.install("2.12.1")
        self.assertFails(self.setup_py("-q", "build", PYTHONPATH=str(self.site)), "is torch 2.12.1")

    def test_error_of_the_build(self):
        self.assertFails(self.setup_py("-q", "build", CXX="no-such-g++"), "no C.. compiler")

    def test_leaves_no_metadata_where_python_would_take_it_for_an_installed_torch(self):
        self.assertEqual(self.setup_py("-q", "egg_info").returncode, 0)
        self.assertEqual(list(REPOSITORY.glob("*.egg-info")), [])

    def test_only_wheels(self):
        for command in ("sdist", "install", "editable_wheel"):
            done = self.setup_py("-q", command)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, "setup.py: error: only wheels can be made of this: `pip wheel")


def record_hashes(base):
    return dict(row[:2] for row in csv.reader((base.info / "RECORD").read_text().splitlines()))


def record_hash(path):
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class RealBuildTest(unittest.TestCase):
    """build/lib, which the tests of this suite run in."""

    @classmethod
    def setUpClass(cls):
        cls.base = setup.find_base()
        cls.lib = REPOSITORY / "build/lib"

    def test_runs_patched_and_its_environment_stays_stock(self):
        code = "import torch; print(torch.__version__, torch.ops._c10d_functional.wait_tensor.default._schema)"
        self.assertEqual(
            run(sys.executable, "-c", code, env=environment(PYTHONPATH=str(self.lib))).stdout,
            f"{setup.patched_version(self.base)} _c10d_functional::wait_tensor(Tensor(a!) self) -> Tensor(a!)\n",
        )
        self.assertEqual(
            run(sys.executable, "-c", code).stdout,
            f"{self.base.version} _c10d_functional::wait_tensor(Tensor tensor) -> Tensor\n",
        )

    def test_stock_files_are_as_installed(self):
        rows = record_hashes(self.base)
        for rel, (old, new) in Patch([REPOSITORY]).plan(self.lib).items():
            self.assertEqual((self.lib / rel).read_bytes(), new)
            if old is None:
                self.assertFalse((self.base.site / rel).exists(), rel)
                continue
            stock = self.base.site / rel
            self.assertFalse(stock.samefile(self.lib / rel), rel)
            self.assertEqual(record_hash(stock), rows[rel], rel)

    def test_python_does_not_write_through_a_link_to_bytecode(self):
        with tempfile.TemporaryDirectory() as temp:
            stock, staged = Path(temp, "stock"), Path(temp, "staged")
            env = environment(PYTHONDONTWRITEBYTECODE="")
            for tree, source in ((stock, "a = 'stock'\n"), (staged, "a = 'patched'\n")):
                tree.mkdir()
                (tree / "x.py").write_text(source)
            run(sys.executable, "-c", "import x", cwd=stock, env=env)
            (cached,) = stock.glob("__pycache__/x.*.pyc")
            before = cached.read_bytes()
            (staged / "__pycache__").mkdir()
            os.link(cached, staged / "__pycache__" / cached.name)
            self.assertEqual(run(sys.executable, "-c", "import x; print(x.a)", cwd=staged, env=env).stdout, "patched\n")
            self.assertNotEqual((staged / "__pycache__" / cached.name).read_bytes(), before)
            self.assertEqual(cached.read_bytes(), before)

    def test_build_again_does_nothing(self):
        self.assertRegex(run(sys.executable, SETUP, "-q", "build").stdout, r"\Anothing to do: .*issue126773\n\Z")


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.mark.timeout(1200)  # a CUDA build is several GB
class WheelTest(unittest.TestCase):
    """The wheel, installed over stock in an environment of its own, and stock installed over it again."""

    def test_install_over_stock_and_back(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.tmp = Path(directory.name)
        base = setup.find_base()
        version = setup.patched_version(base)
        # Uncompressed, to save half of the time.
        options = ("--no-build-isolation", "--no-deps", "--config-settings=--build-option=--compression=stored")
        run(sys.executable, "-m", "pip", "wheel", *options, "-w", self.tmp, REPOSITORY)
        (wheel,) = self.tmp.glob("*.whl")
        self.assertRegex(wheel.name, rf"^torch-{re.escape(version)}-cp3(\d+)-cp3\1-linux_(x86_64|aarch64)\.whl$")

        run(sys.executable, "-m", "venv", "--without-pip", self.tmp / "venv")
        python = self.tmp / "venv/bin/python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        # Links to the stock environment: pip replaces files and does not write into them, as is checked below.
        shutil.copytree(base.site, site, copy_function=link_or_copy, dirs_exist_ok=True)

        def pip(*args):
            return run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *args)

        def installed():
            return {p.relative_to(site) for p in site.rglob("*") if p.is_file() and p.suffix != ".pyc"}

        before = installed()
        code = "import torch; print(torch.__version__, torch.ops._c10d_functional.wait_tensor.default._schema)"

        pip("install", "--no-deps", "--no-compile", wheel)
        out = run(python, "-c", code, cwd=self.tmp, env=environment(PYTHONDONTWRITEBYTECODE="")).stdout
        self.assertEqual(out, f"{version} _c10d_functional::wait_tensor(Tensor(a!) self) -> Tensor(a!)\n")
        self.assertTrue(list(site.rglob("_wait_tensor_library.*.pyc")))
        self.assertIn("No broken requirements", pip("check").stdout)
        self.assertIn(f"Version: {version}\n", pip("show", "torch").stdout)
        satisfied = pip("install", "--no-deps", "--no-index", "torch==2.13.0").stdout
        self.assertRegex(satisfied, r"Requirement already satisfied: torch==2\.13\.0 .*issue126773")
        self.assertIn("torch.distributed.run", (self.tmp / "venv/bin/torchrun").read_text())
        patched = [rel for rel, (old, _) in Patch([REPOSITORY]).plan(base.site).items() if old is not None]
        rows = record_hashes(base)
        for rel in patched:
            self.assertEqual(record_hash(base.site / rel), rows[rel], rel)

        pip("install", "--no-deps", "--no-compile", "--force-reinstall", setup.STOCK)
        self.assertEqual(installed(), before)
        self.assertEqual(list(site.rglob("*wait_tensor*")), [])  # no bytecode either
        self.assertEqual(setup.find_base([str(site)]).identity, base.identity)
        for rel in patched:
            self.assertEqual(record_hash(site / rel), rows[rel], rel)


if __name__ == "__main__":
    unittest.main()
