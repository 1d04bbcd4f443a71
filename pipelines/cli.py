"""`crosstrain`: argument parsing and dispatch.

What a command does lies in the module it calls, imported only when the command runs, so that help is quick.
Status 0: done; 1: the run or the check failed; 2: refused, and repeating it will not help; 75: try again later;
128 + n: stopped by signal n.
"""

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from crosstrain.pipelines.arguments import add_all


def main(argv: Sequence[str] | None = None) -> None:
    """Run `crosstrain`; ends the process with its status."""
    arguments = _parser().parse_args(argv)
    try:
        sys.exit(arguments.command(arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_status", 2))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _call(arguments: argparse.Namespace) -> int:
    """The command of the module that the arguments name."""
    return int(importlib.import_module(arguments.module).main(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crosstrain",
        description="Train language models through Kubeflow pipelines, here or on a cluster.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=_call)
    parser.add_argument("--version", action="version", version=f"crosstrain {version('crosstrain')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_compile(commands)
    add_all(commands)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a compiled pipeline on this machine"
    parser = commands.add_parser(
        "run",
        help=text,
        description=f"{text}. `crosstrain run PIPELINE --help` lists the pipeline's parameters.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this, and the pipeline's parameters")
    parser.add_argument("pipeline", metavar="PIPELINE", nargs="?", help="name of a committed pipeline, or a YAML file")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a parameter; config.train_fp8.learning_rate=1e-3 reaches into a mapping; wins over the run file",
    )
    parser.add_argument("-f", "--file", metavar="RUN.yaml", type=Path, help="run file with `parameters`")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for everything the run makes; the folder of a run that was killed: go on with it "
        "[default: runs/PIPELINE-TIME]",
    )
    parser.add_argument("--verbose", action="store_true", help="print all that the steps print")
    parser.set_defaults(command=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    from crosstrain.pipelines import spec

    if arguments.help:
        print(arguments.parser.format_help(), end="")
        print(spec.help_text(spec.load(arguments.pipeline)) if arguments.pipeline else spec.help_pipelines())
        return 0
    if arguments.pipeline is None:
        arguments.parser.error("the following arguments are required: PIPELINE")
    pipeline = spec.load(arguments.pipeline)

    from crosstrain.pipelines import parameters, run_file

    file_values = run_file.read(arguments.file).parameters if arguments.file else {}
    given = parameters.collect(pipeline, file_values, arguments.set)
    out = arguments.out or Path("runs") / f"{pipeline.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    values = parameters.complete(pipeline, given, state=out.absolute() / "state")

    from crosstrain.pipelines import local
    from crosstrain.pipelines.run_folder import RunFolder

    return local.run(pipeline, values, RunFolder(out), arguments.verbose)


def _add_compile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "compile pipelines and components to the files that are committed"
    parser = commands.add_parser("compile", help=text, description=text, allow_abbrev=False)
    parser.add_argument("names", metavar="NAME", nargs="*", help="pipeline or component [default: all]")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 and one line for each stale file")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder to write into [default: the source tree]")
    parser.add_argument("--versions", action="store_true", help="print each committed pipeline's `pipelineVersion`")
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="print committed (or, by path, your own) compiled pipelines as Pipeline and PipelineVersion objects",
    )
    parser.add_argument("--namespace", metavar="NAME", default="", help="with --kubernetes: put into the objects")
    parser.add_argument(
        "--allow-tags", action="store_true", help="with --kubernetes: take images that are not pinned by digest"
    )
    parser.set_defaults(command=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    if arguments.versions:
        from crosstrain.pipelines import kfp_api, spec

        for name in arguments.names or spec.committed():
            print(kfp_api.version_name(spec.load(name)))
        return 0
    if arguments.kubernetes:
        from crosstrain.pipelines import kubernetes_objects, spec

        made = [
            made
            for name in arguments.names or spec.committed()
            for made in kubernetes_objects.render(spec.load(name), arguments.namespace, arguments.allow_tags)
        ]
        print(kubernetes_objects.dump(made), end="")
        return 0
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
