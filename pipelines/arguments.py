"""The options of the commands that reach a cluster, look at a run or write files; see cli.py for how they are called.

Imports nothing of crosstrain, so that help stays quick.
"""

import argparse
from collections.abc import Callable
from pathlib import Path


def add_all(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `module`, whose `main(arguments)` is the command."""
    for name, (text, add) in _COMMANDS.items():
        parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add(parser)
        parser.set_defaults(module=f"crosstrain.pipelines.{name.replace('-', '_')}")


def _preflight(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pipeline", metavar="PIPELINE", nargs="?", default="", help="name of a committed pipeline, or a compiled YAML "
        "file [default: the run file's, else pretrain_finetune]",
    )  # fmt: skip
    parser.add_argument("-f", "--file", metavar="RUN.yaml", type=Path, required=True, help="run file")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="a parameter; wins over the run file"
    )
    parser.add_argument("--root", metavar="URI", default="", help="where the run will keep its artifacts: s3://…")


def _submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pipeline", metavar="PIPELINE", help="name of a committed pipeline, or a compiled YAML file")
    parser.add_argument("-f", "--file", metavar="RUN.yaml", type=Path, help="run file")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="a parameter; wins over the run file"
    )
    parser.add_argument("--name", default="", help="what the run's name begins with [default: the file's]")
    parser.add_argument("--experiment", default="", help="experiment of the UI [default: the file's, or PIPELINE's]")
    parser.add_argument("--wait", action="store_true", help="until the run is over; its status becomes this command's")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=0.0, help="wait no longer than this [default: no]"
    )
    parser.add_argument("--poll", metavar="S", type=float, default=10.0, help="seconds between two looks [default: 10]")
    _work(parser)
    _server(parser)


def _apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of run files")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; change nothing")
    parser.add_argument(
        "--pipeline",
        metavar="FILE",
        action="append",
        type=Path,
        default=[],
        help="a compiled pipeline of your own that run files name; may be repeated",
    )
    _work(parser)
    _ledger(parser)
    _server(parser)


def _status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of run files")
    _ledger(parser)
    _server(parser)


def _show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="RUN_DIR|URI", help="folder of a run, an artifact, or a prefix with artifacts")
    parser.add_argument(
        "--also", metavar="URI", action="append", default=[], help="look for inputs here as well; may be repeated"
    )
    parser.add_argument("--verify", action="store_true", help="read every object and compare it with its manifest")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _new_component(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="such as clean_text")
    parser.add_argument(
        "--into", metavar="DIR", type=Path, default=Path(), help="folder of the Python package it joins [default: .]"
    )
    parser.add_argument("--tests", metavar="DIR", type=Path, default=Path("tests"), help="its test's [default: tests]")


def _work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--service-account", metavar="NAME", default="", help="service account of the run's pods: crosstrain-runner"
    )
    parser.add_argument(
        "--pipeline-root", metavar="URI", default="", help="where KFP keeps artifacts [default: the namespace's]"
    )


def _ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ledger", metavar="URI", required=True, help="where receipts are kept: s3://bucket/ledger, or a folder"
    )
    parser.add_argument(
        "--take-over-after",
        metavar="S",
        type=float,
        default=900.0,
        help="age at which a claim without a run is taken over [default: 900]",
    )


def _server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Kubeflow Pipelines")
    group.add_argument(
        "--host",
        metavar="URL",
        default="",
        help="API server or Kubeflow's gateway with its path [default: KF_PIPELINES_ENDPOINT; in a pod: ml-pipeline]",
    )
    group.add_argument(
        "--namespace", metavar="NAME", default="", help="multi-user: your namespace [default: the pod's]"
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help="bearer token, read again for each request [default: KF_PIPELINES_SA_TOKEN_PATH]",
    )
    group.add_argument(
        "--existing-token",
        metavar="TOKEN",
        default="",
        help="bearer token as it is; -: from standard input [default: KF_PIPELINES_TOKEN]",
    )
    group.add_argument(
        "--request-timeout", metavar="S", type=float, default=60.0, help="for each answer of the server [default: 60]"
    )


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "preflight": ("check a run before anything is spent, and tell every finding at once", _preflight),
    "submit": ("start a run on a cluster, uploading the pipeline where it is absent", _submit),
    "apply": ("start every run of a folder of run files that has not been started yet", _apply),
    "show": ("what a run made: artifacts, what each was made from, metrics and cost", _show),
    "new-component": ("write a component of your own that works at once, with its test", _new_component),
    "status": ("what became of each run file of a folder", _status),
}
