"""Makes the patched `torch` out of a stock one: stage, patch, compile, pack.

    python setup.py build      makes build/lib/torch; PYTHONPATH=build/lib runs it
    pip wheel --no-build-isolation --no-deps .

The base is the stock torch of the environment that runs this. It is never imported and never written to.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import errno
import fcntl
import filecmp
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
sys.path.insert(0, str(ROOT))  # pip's build hooks do not put it there

from tools.semantic_patch import Patch, PatchError  # noqa: E402
from tools.semantic_patch.tree import check_supported, SUPPORTED  # noqa: E402


# In link order, which is the order in which they register: the kernels need the new schema.
SOURCES = (ROOT / "tools/wheel_shim/shim.cpp", ROOT / "torch/csrc/distributed/c10d/Functional.cpp")
LIBRARY = "libtorch_wait_tensor"  # the name under which tools/wheel_shim/torch/_wait_tensor_library.py loads it
COMPILE = ("-std=c++20", "-O2", "-fPIC", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1")
# Whatever is missing shows when this links or loads, not when it is first called.
LINK = ("-shared", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-rpath,$ORIGIN")
STOCK = f"torch{SUPPORTED}"
STAMP = ".base.json"  # in the staged tree: what it was staged from
MB = 10**6


class BuildError(Exception):
    """What went wrong, where, and what to do about it."""


# ---- base: the stock torch


@dataclass(frozen=True)
class Base:
    site: Path  # the directory that holds torch/
    info: Path  # its .dist-info
    version: str
    commit: str
    files: dict[str, int]  # all it consists of, as paths relative to site, with their sizes
    bytecode: tuple[str, ...]
    identity: str  # the same for two installs of one wheel

    @property
    def library(self) -> str:
        return f"torch/lib/{LIBRARY}-{self.commit[:12]}.so"

    @property
    def size(self) -> int:
        return sum(self.files.values())


def find_base(path: list[str] | None = None) -> Base:
    """The stock torch that `import torch` would find, but for what was made here."""
    for dist in importlib.metadata.distributions(name="torch", **({} if path is None else {"path": path})):
        site = Path(str(dist.locate_file(""))).resolve()
        if site not in (ROOT, BUILD / "lib"):
            return read_base(dist, site)
    raise BuildError(
        f"no torch is installed for {sys.executable}; the patched one is made from stock torch. "
        f"Run `make build`, which installs it in .venv, or `{sys.executable} -m pip install {STOCK}`"
    )


def read_base(dist: importlib.metadata.Distribution, site: Path) -> Base:
    torch = f"torch {dist.version} in {site}"
    get_stock = f"`{sys.executable} -m pip install --force-reinstall --no-deps {STOCK}`"
    record = sorted(row for row in csv.reader((dist.read_text("RECORD") or "").splitlines()) if row)
    infos = [row[0] for row in record if row[0].endswith(".dist-info/METADATA")]
    if not infos or not (site / "torch/version.py").is_file():
        raise BuildError(
            f"the {torch} was not installed from a wheel (editable or from source?): its RECORD or torch/version.py is "
            f"missing. Use an environment with stock torch: {get_stock}. To patch a source checkout instead: "
            "`python -m tools.semantic_patch apply CHECKOUT`"
        )
    info = site / Path(infos[0]).parent
    if (site / ".semantic_patch/manifest.json").exists():
        raise BuildError(
            f"the {torch} has been patched where it lies, and the build needs a stock one. Undo that first: "
            f"`python -m tools.semantic_patch revert {site}`"
        )
    if any((site / "torch/lib").glob(f"{LIBRARY}-*.so")):
        raise BuildError(
            f"the {torch} is a patched one already, and the build needs a stock one. "
            f"Use another environment (`make build` uses .venv), or go back to stock: {get_stock}"
        )
    try:
        check_supported(dist.version, site)
    except PatchError as e:
        raise BuildError(f"{e} (to get {STOCK}: {get_stock})") from e

    scripts = {point.name for point in dist.entry_points if point.group == "console_scripts"}
    files, bytecode, identity = {}, [], hashlib.sha256()
    for rel, digest, size in record:
        if rel.endswith(".pyc"):
            bytecode.append(rel)
        elif rel.startswith(f"{info.name}/"):
            continue
        elif not rel.startswith(("/", "..")):
            files[rel] = int(size or 0)
            identity.update(f"{rel}\0{digest}\n".encode())
        elif Path(rel).name not in scripts:
            raise BuildError(
                f"the {torch} owns {rel}, outside its packages; this build does not know what to do with it"
            )
    version = strings(site / "torch/version.py")
    if not version.get("git_version"):
        raise BuildError(f"{site}/torch/version.py states no git_version; install that torch afresh: {get_stock}")
    return Base(
        site, info, version["__version__"], version["git_version"], files, tuple(bytecode), identity.hexdigest()
    )


def strings(module: Path | bytes) -> dict[str, str]:
    """The string constants that a module assigns, read without running it."""
    return {
        ast.unparse(s.targets[0]): s.value.value
        for s in ast.parse(module.read_bytes() if isinstance(module, Path) else module).body
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str)
    }


def patched_version(base: Base) -> str:
    """The base's version with the label that the patch gives it (tools/wheel_shim/torch/version.yml)."""
    return strings(Patch([ROOT / "tools/wheel_shim"]).plan(base.site)["torch/version.py"][1])["__version__"]


# ---- build/lib: stage, patch, compile


def build(base: Base, patch: Patch, sources: Sequence[Path] = SOURCES, out: Path = BUILD) -> bool:
    """Bring out/lib up to date; False if it was. A failure leaves it as it was."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise BuildError(
            f"this builds on Linux x86-64 and aarch64 only; here is {platform.system()} {platform.machine()}"
        )
    with locked(out):
        lib = out / "lib"
        compiler = Compiler.find(base, sources, out / "temp")
        status = staged_status(base, patch, lib)
        staged = bool(status)
        if status.startswith("applied and current") and same(compiler.library, lib / base.library):
            return False
        tree = lib if staged else out / "lib.new"
        try:
            if not staged:
                stage(base, tree)
            if not compiler.library.exists():
                with step("check the patch"):  # before the long step, not after it
                    patch.plan(tree)
                with step(f"compile {', '.join(source.name for source in sources)} (about half a minute)"):
                    compiler.run()
            with step("apply the patch"):
                patch.apply(tree)
                replace(compiler.library, tree / base.library)
            if not staged:
                swap(tree, lib)
        finally:
            if not staged:
                shutil.rmtree(tree, ignore_errors=True)
    return True


def staged_status(base: Base, patch: Patch, lib: Path) -> str:
    """How lib stands to the patch; "" if it is no tree of this base that apply can bring up to date."""
    try:
        status = patch.status(lib)
        if (lib / STAMP).read_text() == base.identity and not status.text.startswith("half-applied"):
            return status.text
    except (OSError, PatchError):
        pass
    return ""


def stage(base: Base, tree: Path) -> None:
    """Make `tree` a copy of the base, of hard links where the filesystem has them."""
    with step(f"stage torch {base.version} ({base.size // MB} MB, as hard links where possible)"):
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        link = os.link if can_link(base.site / "torch/version.py", tree) else copy
        if link is copy:
            check_space(tree, base.size)
        for directory in {os.path.dirname(rel) for rel in (*base.files, *base.bytecode)}:
            (tree / directory).mkdir(parents=True, exist_ok=True)
        for rel in base.files:
            try:
                link(base.site / rel, tree / rel)
            except FileNotFoundError as e:
                raise BuildError(
                    f"the torch in {base.site} lacks its own {rel}; install it afresh: "
                    f"`{sys.executable} -m pip install --force-reinstall --no-deps {STOCK}`"
                ) from e
        for rel in base.bytecode:  # saves half a minute of the first import; python replaces what is stale
            with contextlib.suppress(FileNotFoundError):
                link(base.site / rel, tree / rel)
        for name in neighbours(base):
            (tree / name).symlink_to(base.site / name)
        (tree / STAMP).write_text(base.identity)


def can_link(source: Path, directory: Path) -> bool:
    probe = directory / ".link"
    try:
        os.link(source, probe)
    except OSError:  # another filesystem, one without hard links, or not our file
        return False
    probe.unlink()
    return True


def copy(source: Path, target: Path) -> None:
    shutil.copy2(source, target)


def neighbours(base: Base) -> list[str]:
    """The directories beside torch/ in which its libraries look for others: NVIDIA's, in a CUDA build."""
    library = base.site / "torch/lib/libtorch_global_deps.so"
    paths = re.findall(rb"\$ORIGIN/\.\./\.\./([\w-]+)", library.read_bytes()) if library.exists() else []
    return sorted({name for name in map(bytes.decode, paths) if (base.site / name).is_dir()})


def swap(new: Path, tree: Path) -> None:
    old = tree.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if tree.exists():
        tree.rename(old)
    new.rename(tree)
    shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class Compiler:
    """Makes the library; what it makes is named after all that went into it."""

    command: list[str]
    sources: Sequence[Path]
    base: Base
    objects: list[Path]
    library: Path

    @staticmethod
    def find(base: Base, sources: Sequence[Path], temp: Path) -> Compiler:
        cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
        if not shutil.which(cxx[0]):
            raise BuildError(
                f"there is no C++ compiler '{cxx[0]}'. Install g++ 11 or newer (Debian, Ubuntu: `apt-get install g++`) "
                "or set CXX to a compiler with C++20"
            )
        flags = [*COMPILE, f'-DWAIT_TENSOR_TORCH_COMMIT="{base.commit}"', *shlex.split(os.environ.get("CXXFLAGS", ""))]
        version = subprocess.run([*cxx, "--version"], capture_output=True, text=True, check=False).stdout

        def key(*data: bytes) -> str:
            return hashlib.sha256(repr((cxx, version, flags, LINK, base.identity, data)).encode()).hexdigest()[:16]

        content = [source.read_bytes() for source in sources]
        objects = [temp / f"{source.stem}-{key(data)}.o" for source, data in zip(sources, content)]
        return Compiler([*cxx, *flags], sources, base, objects, temp / f"{LIBRARY}-{key(*content)}.so")

    def run(self) -> None:
        torch = self.base.site / "torch"
        include = ["-isystem", torch / "include", "-isystem", torch / "include/torch/csrc/api/include"]
        temp = self.library.parent
        temp.mkdir(parents=True, exist_ok=True)
        check_space(temp, 20 * MB)
        run_all(
            {
                target: [*self.command, *include, "-c", source]
                for source, target in zip(self.sources, self.objects)
                if not target.exists()
            }
        )
        run_all({self.library: [*self.command, *self.objects, "-L", torch / "lib", *LINK]})
        for path in temp.iterdir():
            if path not in (*self.objects, self.library):
                path.unlink()


def run_all(commands: dict[Path, list[str | Path]]) -> None:
    """Run compiler commands side by side. Each one's output appears at its path when it is complete."""
    running = []
    try:
        for target, command in commands.items():
            partial = target.with_suffix(f".{os.getpid()}.partial")
            log = tempfile.TemporaryFile()
            process = subprocess.Popen([*command, "-o", partial], stdout=log, stderr=subprocess.STDOUT)
            running.append((target, partial, log, process))
        for target, partial, log, process in running:
            if code := process.wait():
                log.seek(0)
                sys.stdout.flush()
                sys.stderr.write("\n" + log.read().decode(errors="replace"))
                raise BuildError(
                    f"the C++ compiler failed ({f'killed by signal {-code}: memory?' if code < 0 else f'exit {code}'}); "
                    f"its own message is above. The command was: {shlex.join(map(str, process.args))}. "
                    "It needs C++20: g++ 11 or newer, or another compiler in CXX"
                )
            partial.rename(target)
    finally:
        for _, partial, log, process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
            partial.unlink(missing_ok=True)
            log.close()


def same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and filecmp.cmp(a, b, shallow=False)


def replace(source: Path, target: Path) -> None:
    """Copy; a process that has the old library loaded keeps it."""
    if not same(source, target):
        new = target.with_suffix(".new")
        shutil.copy2(source, new)
        new.rename(target)


# ---- the wheel


def pack(base: Base, patch: Patch, lib: Path, info: Path, wheel: Path, compression: int) -> None:
    """Write the wheel from build/lib and a .dist-info."""
    from wheel.wheelfile import WheelFile

    members = [(lib / name, name) for name in sorted({*base.files, *patch.plan(lib), base.library})]
    members += [(path, f"{info.name}/{path.relative_to(info)}") for path in sorted(info.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path, _ in members)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    check_space(wheel.parent, size if compression == zipfile.ZIP_STORED else size // 2)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pack-") as temp:
        part = Path(temp, wheel.name)
        with step(f"pack {wheel.name} ({size // MB} MB, about half a minute)"):
            with WheelFile(part, "w", compression) as archive:
                for path, name in members:
                    archive.write(str(path), name)
        part.replace(wheel)


def write_info(base: Base, version: str, info: Path) -> None:
    """The base's own metadata, under the patched version."""
    shutil.copytree(
        base.info,
        info,
        ignore=shutil.ignore_patterns("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json", "*.pyc"),
        dirs_exist_ok=True,
    )
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    metadata, count = re.subn(r"(?m)\A((?:.+\n)*?)Version: .+$", rf"\g<1>Version: {version}", metadata, count=1)
    if count != 1:
        raise BuildError(f"{base.info}/METADATA states no version; install that torch afresh")
    (info / "METADATA").write_text(metadata, encoding="utf-8")


# ---- shared


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    print(f"{what} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:.1f} s", flush=True)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    fd = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"wait for another build in {out}"):
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(f"no space left on the disk for {out}; free some and run this again") from e
        raise BuildError(f"{e.filename or out}: {e.strerror or e}") from e
    finally:
        os.close(fd)


def check_space(directory: Path, size: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < size:
        raise BuildError(
            f"no space in {directory}: {size // MB} MB are needed and {free // MB} MB are free; nothing was changed"
        )


def main() -> None:
    try:
        import setuptools
        from setuptools.command.bdist_wheel import bdist_wheel
        from setuptools.command.build import build as build_command
        from setuptools.command.editable_wheel import editable_wheel
        from setuptools.command.install import install
        from setuptools.command.sdist import sdist
        from wheel import wheelfile  # noqa: F401
    except ImportError as e:
        raise BuildError(
            f"setuptools or wheel is missing or too old ({e}): `make build`, or pip install -r requirements.txt"
        ) from e

    base = find_base()
    version = patched_version(base)

    class Build(build_command):
        def run(self) -> None:
            if not build(base, Patch([ROOT])):
                print(f"nothing to do: build/lib holds torch {version}")

    class Wheel(bdist_wheel):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.root_is_pure = False

        def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
            write_info(base, version, Path(distinfo_path))
            shutil.rmtree(egginfo_path, ignore_errors=True)

        def run(self) -> None:
            self.run_command("build")
            name = self.wheel_dist_name
            wheel = Path(self.dist_dir, f"{name}-{'-'.join(self.get_tag())}.whl")
            with locked(BUILD), tempfile.TemporaryDirectory(dir=BUILD) as temp:
                info = Path(temp, f"{name}.dist-info")
                write_info(base, version, info)
                self.write_wheelfile(str(info))
                pack(base, Patch([ROOT]), BUILD / "lib", info, wheel, self._zip_compression())

    def refuse(self: setuptools.Command) -> None:
        raise BuildError(
            "only wheels can be made of this: `pip wheel --no-build-isolation --no-deps .`. "
            "To run the patched torch from here: `make build`, then PYTHONPATH=build/lib"
        )

    BUILD.mkdir(exist_ok=True)
    setuptools.setup(
        name="torch",
        version=version,
        packages=[],
        py_modules=[],
        options={"egg_info": {"egg_base": str(BUILD)}},  # here it would pass for an installed torch
        cmdclass={
            "build": Build,
            "bdist_wheel": Wheel,
            **{c.__name__: type(c.__name__, (c,), {"run": refuse}) for c in (editable_wheel, install, sdist)},
        },
    )


if __name__ == "__main__":
    try:
        main()
    except (BuildError, PatchError, OSError) as e:
        sys.exit(f"setup.py: error: {e}")
