"""What a run leaves to be read by programs: summary.json, and its HTML reports under names a browser opens."""

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosstrain.components.core.manifest import finite
from crosstrain.pipelines.progress import Progress
from crosstrain.pipelines.run_folder import RunFolder
from crosstrain.pipelines.spec import Pipeline


def describe(
    pipeline: Pipeline,
    values: Mapping[str, Any],
    progress: Progress,
    status: str,
    started: float,
    ended: float | None,
    reports: Sequence[Path],
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        pipeline: What ran.
        values: Its parameters, defaults included.
        progress: Its steps.
        status: running, succeeded, failed or stopped.
        started: Seconds since the epoch.
        ended: Likewise; None while it runs.
        reports: HTML reports.
    """
    return {
        "pipeline": pipeline.name,
        "pipeline_sha256": pipeline.sha256,
        "parameters": dict(values),
        "status": status,
        "started": _time(started),
        "ended": None if ended is None else _time(ended),
        "versions": {name: version(name) for name in ("crosstrain", "kfp")},
        "reports": [str(path) for path in reports],
        "cost": cost(progress),
        "steps": [
            {
                "task": step.task,
                "title": step.title,
                "component": step.component,
                "status": step.status,
                "seconds": round(step.seconds, 3),
                "metrics": finite(step.metrics),
                "uri": step.uri,
                "manifest_sha256": step.manifest_sha256,
                "peak_rss_bytes": step.peak_rss_bytes,
                "error": step.error,
            }
            for step in progress.ordered()
        ],
    }


def cost(progress: Progress) -> dict[str, Any]:
    """The run's cost in USD, as the sum of its steps' (None: no step has one), and by step or why not."""
    steps = {step.title: step.metrics["cost_usd"] for step in progress.ordered() if "cost_usd" in step.metrics}
    if not steps:
        why = "no cost: no step ran as a job on an instance type that has a price (run_on.instance_type, run_on.prices)"
        return {"usd": None, "basis": why}
    listed = ", ".join(f"{title} {usd:,.2f}" for title, usd in steps.items())
    return {"usd": round(sum(steps.values()), 6), "basis": f"USD: {listed}; steps without a price are not in it"}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def read_foreign_metrics(folder: RunFolder, progress: Progress) -> None:
    """Fill in the metrics and outputs of finished steps that write no events, from what KFP's executor left."""
    for step in progress.ordered():
        output = folder.output(step.task)
        if step.uri or step.status != "done" or output is None:
            continue
        step.uri = str(output)
        left = output / "executor_output.json"
        artifacts = json.loads(left.read_bytes()).get("artifacts", {}) if left.is_file() else {}
        for name, title in step.outputs.items():
            if title == "system.Metrics" and name in artifacts:
                metadata = artifacts[name]["artifacts"][0].get("metadata", {})
                step.metrics = {key: value for key, value in metadata.items() if isinstance(value, int | float)}


def collect_reports(folder: RunFolder, progress: Progress) -> list[Path]:
    """Copy the HTML outputs of finished steps beside the summary: KFP gives them no file ending."""
    found = [
        (step.task, name, output / name)
        for step in progress.ordered()
        for name, title in step.outputs.items()
        if title == "system.HTML"
        and step.status in ("done", "reused")
        and (output := folder.output(step.task)) is not None
        and (output / name).is_file()
    ]
    names = [name for _, name, _ in found]
    reports = []
    for task_name, name, path in found:
        stem = name if names.count(name) == 1 else f"{task_name.replace('/', '-')}-{name}"
        report = folder.path / f"{stem}.html"
        shutil.copyfile(path, report)
        reports.append(report)
    return reports
