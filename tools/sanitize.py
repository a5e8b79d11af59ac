"""Runs the tests of the C++ part under AddressSanitizer.

    .venv/bin/python -m tools.sanitize [PYTEST ARGUMENT …]

Builds a patched torch beside build/, with the wait library compiled for the sanitizer; libtorch
itself is stock's, but its heap is the sanitizer's, too, so that a bad access of ours to a tensor's
memory, or to an object of libtorch's that was freed, is reported with its stack. Leaks are not
looked for: Python and torch never free much of what they hold at exit. Prints the reports, and
fails if there is one, or a test fails. g++ is what knows where the sanitizer's library is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "asan"
# Eager kernels, functionalization of views and of bases, waits that copy, inputs in flight.
TESTS = [
    "test/inductor/test_wait_tensor_effects.py",
    "-k",
    "TestSchema or TestEager or TestTracedGraphs or TestLowering or TestWaitedInputs",
]


def build() -> Path:
    """The tree with the instrumented library."""
    os.environ["CXXFLAGS"] = "-fsanitize=address -fno-omit-frame-pointer -g -O1"
    import setup

    base = setup.find_base()
    setup.build(base, setup.Patch([ROOT]), out=OUT)
    library = OUT / "lib" / base.library
    if b"__asan_report" not in library.read_bytes():
        sys.exit(f"sanitize.py: {library} is not instrumented; is {os.environ.get('CXX', 'g++')} without AddressSanitizer?")
    return OUT / "lib"


def main(arguments: list[str]) -> int:
    lib = build()
    asan = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    if not os.path.isabs(asan):
        sys.exit("sanitize.py: g++ has no libasan.so; install it (Debian, Ubuntu: it comes with g++)")
    with tempfile.TemporaryDirectory() as logs:
        env = os.environ | {
            "PYTHONPATH": str(lib),
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": asan,
            "ASAN_OPTIONS": f"detect_leaks=0,log_path={logs}/report,halt_on_error=1",
        }
        env.pop("CXXFLAGS")
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=1200", *(arguments or TESTS)],
            cwd=ROOT,
            env=env,
            check=False,
        ).returncode
        reports = [p.read_text() for p in sorted(Path(logs).iterdir())]
    for report in reports:
        print(report)
    print(f"AddressSanitizer: {len(reports)} reports")
    return code or len(reports)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
