"""The process that runs a compiled pipeline through KFP's local runner: `python -m crosstrain.pipelines.kfp_process`.

A process of its own, because kfp takes over logging and standard output, and because a run must be stoppable
whole. It reads one JSON request from standard input: `pipeline` (path of the YAML), `arguments`, `root` (folder
for outputs), `scratch` (folder that ends with the run) and `parent` (process id of `crosstrain`, whose death ends
this process and all it started).

Four things differ from kfp's defaults. Outputs lie under `<root>/<pipeline>/<task>`, without the time in the
path, so that a run continued in the same folder finds what is finished. `python3` in a step's command is
found on the PATH, where `crosstrain run` puts it, because kfp would replace that text in arguments and paths too.
Steps are started here, because the iterations of a loop run in threads, two at once, and kfp calls them all by one
name: here each goes by the folder of its outputs (`for-loop-1-iteration-0/train-fp8`), in events, in its log and in
the lines it prints. And kfp's own ways to log and to indent, which change global state, are switched off: in
threads they take each other's lines away.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from crosstrain.components.core import telemetry
from crosstrain.pipelines import processes


def main() -> None:
    """Run the request; status 0, or 1 after a `failed` event that belongs to no step."""
    request = json.load(sys.stdin)
    scratch = Path(request["scratch"])

    def stop(number: int, frame: FrameType | None) -> None:
        processes.end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    processes.adopt_orphans()
    processes.end_with_parent(request["parent"])
    try:
        run(Path(request["pipeline"]), request["arguments"], Path(request["root"]), scratch)
    except Exception as error:  # noqa: BLE001 - kfp raises anything; crosstrain reports it, the log has the traceback
        traceback.print_exc()
        telemetry.emit("failed", error=f"{type(error).__name__}: {error}")
        sys.exit(1)


def run(pipeline: Path, arguments: dict[str, object], root: Path, scratch: Path) -> None:
    """Run a compiled pipeline with KFP's subprocess runner, in this Python environment."""
    from kfp import components, local
    from kfp.local import executor_input_utils, importer_handler, logging_utils, subprocess_task_handler

    executor_input_utils.get_local_pipeline_resource_name = _plain_name
    subprocess_task_handler.run_local_subprocess = partial(run_step, root)
    importer_handler.run_importer = partial(run_importer, importer_handler.run_importer)
    logging_utils.local_logger_context = logging_utils.indented_print = nullcontext
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.executable = "python3"
    workspace = scratch / "workspace"  # kfp deletes it after the run
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root), workspace_root=str(workspace))
    components.load_component_from_file(str(pipeline))(**arguments)


def _plain_name(pipeline_name: str) -> str:
    return pipeline_name


def run_step(root: Path, full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
    """Run one step's command, under its name and with events for its beginning and end; its status.

    Args:
        root: Folder that the outputs of all pipelines lie under.
        full_command: The command, with the executor's input as JSON in it.
        env_vars: Environment that the pipeline sets for the step.
    """
    executor_input = json.loads(full_command[full_command.index("--executor_input") + 1])
    task = task_name(root, Path(executor_input["outputs"]["outputFile"]).parent)
    telemetry.emit("executing", task=task)
    said = ""
    with subprocess.Popen(
        full_command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        env={**os.environ, **(env_vars or {}), telemetry.TASK_VARIABLE: task},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said = line.strip() or said
            sys.stdout.write(f"[{task}] {line.rstrip()}\n")
        status = process.wait()
    number = -status if status < 0 else status - 128 if 128 < status < 128 + signal.NSIG else 0
    telemetry.emit("ended", task=task, succeeded=status == 0, signal=number, said=said)
    return status


def run_importer(importer: Callable[..., Any], **given: Any) -> Any:
    """Run kfp's importer, which is no process, with the same events."""
    task = "/".join([*given["pipeline_resource_name"].split("/")[1:], given["component_name"].removeprefix("comp-")])
    telemetry.emit("executing", task=task)
    outputs, status = importer(**given)
    telemetry.emit("ended", task=task, succeeded=status.name == "SUCCESS", signal=0, said="see the run's log")
    return outputs, status


def task_name(root: Path, outputs: Path) -> str:
    """A task's name in the run: where its outputs lie below the pipeline's folder."""
    return Path(*outputs.relative_to(root).parts[1:]).as_posix()


if __name__ == "__main__":
    main()
