"""`crosstrain submit`: upload a compiled pipeline where it is absent, start one run of it, and perhaps wait for it.

Every call starts a run; what must start once, whoever asks and how often, is declared in a run file for `apply`.
"""

import argparse
import sys
import time

from crosstrain.pipelines import parameters, run_file, spec
from crosstrain.pipelines.connect import open_api
from crosstrain.pipelines.kfp_api import ENDED, Api, Work, version_name
from crosstrain.pipelines.kfp_http import TRY_AGAIN, ApiError

_PATIENCE_SECONDS = 600.0
"""How long a server that is down may stay so while a run is waited for."""


def main(arguments: argparse.Namespace) -> int:
    """Submit; 0: started (with --wait: succeeded), 1: the run failed, 2: refused, 75: try again or not over yet."""
    pipeline = spec.load(arguments.pipeline)
    file = run_file.read(arguments.file) if arguments.file else run_file.RunFile.decode({})
    if file.schedule is not None:
        raise ValueError(f"{arguments.file}: has a schedule, which `crosstrain apply` makes; submit starts one run")
    if file.pipelineVersion not in ("", version_name(pipeline)):
        raise ValueError(
            f"{arguments.file}: wants {file.pipelineVersion}, and {arguments.pipeline} is {version_name(pipeline)}"
        )
    given = parameters.collect(pipeline, file.parameters, arguments.set)
    parameters.check_remote(pipeline, given)
    api = open_api(arguments)
    version = api.ensure_version(pipeline)
    print(f"version {version.name}  {version.version_id}", flush=True)
    name = arguments.name or file.name or pipeline.name
    work = Work(
        display_name=f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
        experiment_id=api.experiment(arguments.experiment or file.experiment or pipeline.name),
        version=version,
        parameters=given,
        description="crosstrain submit",
        service_account=arguments.service_account,
        pipeline_root=arguments.pipeline_root,
    )
    run_id = api.create_run(work)
    print(f"run {run_id}  {work.display_name}  {api.url(run_id)}", flush=True)
    return wait(api, run_id, arguments.poll, arguments.timeout) if arguments.wait else 0


def wait(api: Api, run_id: str, poll: float, timeout: float) -> int:
    """Follow a run to its end; the process status for it.

    Args:
        api: Where it runs.
        run_id: The run.
        poll: Seconds from one look to the next.
        timeout: Seconds after which to stop looking; 0: never. The run goes on.
    """
    started, answered, before = time.monotonic(), time.monotonic(), ""
    while True:
        try:
            run = api.run(run_id)
            answered = time.monotonic()
        except ApiError as error:
            if not error.retry or time.monotonic() - answered > _PATIENCE_SECONDS:
                raise
            print(f"{error}; the run goes on", file=sys.stderr, flush=True)
            run = {}
        state = run.get("state", before)
        if state != before:
            print(f"{time.strftime('%H:%M:%S')} {state}", flush=True)
            before = state
        if state in ENDED:
            if state == "SUCCEEDED":
                return 0
            reason = " ".join((run.get("error") or {}).get("message", "").split())
            print(f"error: run {run_id} ended as {state}{f': {reason}' if reason else ''}", file=sys.stderr)
            return 1
        if timeout and time.monotonic() - started > timeout:
            print(f"error: run {run_id} is not over after {timeout:g} s and goes on", file=sys.stderr)
            return TRY_AGAIN
        time.sleep(poll)
