"""`crosstrain`: argument parsing and dispatch.

What a command does lies in the module it calls, imported only when the command runs, so that help is quick.
Status 0: done; 1: the run or the check failed; 2: a usage error; 128 + n: stopped by signal n.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Run `crosstrain`; ends the process with its status."""
    arguments = _parser().parse_args(argv)
    try:
        sys.exit(arguments.command(arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crosstrain",
        description="Train language models through Kubeflow pipelines, here or on a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crosstrain {version('crosstrain')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_compile(commands)
    return parser


def _add_compile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "compile pipelines and components to the files that are committed"
    parser = commands.add_parser("compile", help=text, description=text, allow_abbrev=False)
    parser.add_argument("names", metavar="NAME", nargs="*", help="pipeline or component [default: all]")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 and one line for each stale file")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder to write into [default: the source tree]")
    parser.set_defaults(command=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    from crosstrain.pipelines import compile as compiling

    root = arguments.out or compiling.source_root()
    files = compiling.build(arguments.names)
    if not arguments.check:
        for name in compiling.write(files, root):
            print(f"wrote {root / name}")
        return 0
    lines = compiling.stale(files, root) + ([] if arguments.names else compiling.orphans(root))
    for line in lines:
        print(f"stale: {line}", file=sys.stderr)
    if lines:
        print(f"error: {len(lines)} stale files under {root}; run `crosstrain compile`", file=sys.stderr)
    return 1 if lines else 0
