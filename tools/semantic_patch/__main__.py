"""The command line: python -m tools.semantic_patch apply|revert|status|diff TREE."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import Patch, PatchError, WHEEL_NOTE
from .tree import KINDS, WHEEL


REPOSITORY = Path(__file__).resolve().parents[2]
EPILOG = """\
TREE is a directory that contains torch/: an installed wheel's copy or a source checkout. Its state is
kept in TREE/.semantic_patch.

exit codes:
  0  done; status: not applied, or applied and current
  1  error; the tree is as it was
  2  usage
  3  status: applied from another version of the patch
  4  status: files were changed by hand since apply
  5  status: half-applied (an apply was interrupted); revert repairs it
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.semantic_patch",
        description="Apply this repository's patch to a PyTorch tree.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("apply", "apply the patch, or bring an applied one up to date"),
        ("revert", "restore upstream's files exactly"),
        ("status", "say how the tree stands to the patch"),
        ("diff", "print the change as a patch for git apply; changes nothing"),
    ):
        command = commands.add_parser(
            name, help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("tree", type=Path, metavar="TREE")
        command.add_argument(
            "--root", type=Path, action="append", help="a directory of the patch (default: this repository)"
        )
        if name in ("apply", "diff"):
            command.add_argument("--kind", choices=KINDS, help="what TREE is (default: see for itself)")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (PatchError, OSError) as e:
        print(f"semantic_patch: error: {e}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    patch = Patch(args.root or [REPOSITORY])
    if args.command == "status":
        status = patch.status(args.tree)
        print(status.text)
        return status.code
    if args.command == "diff":
        sys.stdout.buffer.write(patch.diff(args.tree, args.kind).encode())
        return 0
    if args.command == "revert":
        result = patch.revert(args.tree)
    else:
        result = patch.apply(args.tree, args.kind)
    for word in ("changed", "added", "restored", "removed"):
        for rel in getattr(result, word):
            print(f"{word} {rel}")
    if not result.wrote:
        print("nothing to do: " + ("not applied" if args.command == "revert" else "applied and current"))
    if args.command == "apply" and result.kind == WHEEL:
        print(WHEEL_NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
