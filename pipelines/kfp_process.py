"""The process that runs a compiled pipeline through KFP's local runner: `python -m crosstrain.pipelines.kfp_process`.

A process of its own, because kfp takes over logging and standard output, and because a run must be stoppable
whole. It reads one JSON request from standard input: `pipeline` (path of the YAML), `arguments`, `root` (folder
for outputs), `scratch` (folder that ends with the run) and `parent` (process id of `crosstrain`, whose death ends
this process and all it started).

Two things differ from kfp's defaults. Outputs lie under `<root>/<pipeline>/<task>`, without the time in the
path, so that a run continued in the same folder finds what is finished. And `python3` in a step's command is
found on the PATH, where `crosstrain run` puts it, because kfp would replace that text in arguments and paths too.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

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
    from kfp.local import executor_input_utils

    executor_input_utils.get_local_pipeline_resource_name = _plain_name
    sys.executable = "python3"
    workspace = scratch / "workspace"  # kfp deletes it after the run
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root), workspace_root=str(workspace))
    components.load_component_from_file(str(pipeline))(**arguments)


def _plain_name(pipeline_name: str) -> str:
    return pipeline_name


if __name__ == "__main__":
    main()
