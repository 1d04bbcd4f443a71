"""Running a component's program: from a KFP face, from the command line, and never twice.

A component folder holds `config.py` with `Config` (cheap to import) and `program.py` with
`run(config) -> Result`, which knows nothing of KFP. `run_step` is the one call in every face, `main` is the
body of every `__main__`, and both go through `execute`, which returns a finished output as it is when the
very same work was done before.
"""

import importlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from crosstrain.components.core import telemetry
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.config import OUTPUT, SOURCE, Config, parse_arguments
from crosstrain.components.core.manifest import MANIFEST_NAME, Source, finite

log = logging.getLogger(__name__)

COMPONENTS = (
    "preflight", "import_data", "import_model", "tokenize", "shard", "train_fp8", "finetune_lora", "merge", "evaluate",
    "tokenize_plan", "tokenize_partition", "tokenize_join", "compare_arms", "finetune_full", "consolidate",
)  # fmt: skip

RECORD_NAME = "run.json"
"""Object beside the manifest: time, host, versions and metrics of the run that made it. No part of its identity."""

DATA_SUFFIX = ".data"
"""A KFP artifact at URI u is the manifest's bytes; its objects lie under u + DATA_SUFFIX."""


@dataclass(frozen=True)
class Result:
    """What a program made."""

    artifact: Artifact
    metrics: dict[str, float] = field(default_factory=dict)
    """Name to value, as KFP's Metrics show them; values that are not finite are left out."""
    html: str = ""
    """A self-contained page, for components with an HTML output."""
    markdown: str = ""
    job: dict[str, Any] = field(default_factory=dict)
    """Where a job did the work: how it went, the ranks' own record, and what it cost."""


def package_of(component: str) -> str:
    """The package behind a component's name: a folder's name here, or the full name of somebody else's package."""
    return component if "." in component else f"crosstrain.components.{component}"


def load_config(component: str) -> type[Config]:
    """The configuration class of a component; never imports torch."""
    config: type[Config] = importlib.import_module(f"{package_of(component)}.config").Config
    return config


def load_program(component: str) -> ModuleType:
    """The program module of a component.

    Idle OpenMP threads are told to sleep, before torch loads their library: by default they spin, and on a machine
    that is shared (two steps of a run at once) a training step then takes several times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return importlib.import_module(f"{package_of(component)}.program")


def execute(component: str, config: Config) -> Result:
    """Run a component, or return what it made before at the same output from the same inputs and options.

    Raises:
        ValueError: the output already holds a different artifact, or the program refuses its input.
    """
    if (finished := _finished(component, config)) is not None:
        log.info("%s: already made, nothing to do", finished.artifact.uri)
        return finished
    started = time.time()
    result: Result = load_program(component).run(config)
    record = {
        "component": component,
        "started": started,
        "seconds": time.time() - started,
        "peak_rss_bytes": telemetry.peak_rss_bytes(),
        "host": platform.node(),
        "platform": platform.platform(),
        "versions": _versions(),
        "metrics": finite(result.metrics),
        "html": result.html,
        "markdown": result.markdown,
        **({"job": result.job} if result.job else {}),
    }
    if os.environ.get("RANK", "0") == "0":  # of several processes that do one piece of work, the first tells of it
        result.artifact.store.write(RECORD_NAME, json.dumps(record, indent=2, sort_keys=True).encode())
    return result


def _finished(component: str, config: Config) -> Result | None:
    """The result that stands at the output already, if it is this very work."""
    inputs = config.artifacts()
    if not inputs or config.uris(SOURCE):
        return None  # an import: its source may have changed, and it copies little
    (output,) = (getattr(config, name) for name in config.uris(OUTPUT))
    try:
        artifact = Artifact.open(output)
    except FileNotFoundError:
        return None
    manifest = artifact.manifest
    if manifest.base:
        return None  # by reference: it is made quickly, and what it refers to may have changed
    sources = {name: Artifact.open(uri).manifest.source() for name, uri in inputs.items()}
    difference = _difference(manifest.options, config.options()) or _difference(manifest.inputs, sources)
    if manifest.component != component or difference:
        raise ValueError(
            f"{output}: already holds the {manifest.kind} of another run of {manifest.component} "
            f"({difference or 'another component'}); choose another output, or delete it first"
        )
    try:
        record = json.loads(artifact.store.read(RECORD_NAME))
    except FileNotFoundError:
        return None  # killed between manifest and record: the work is repeated
    return Result(artifact, record["metrics"], record["html"], record["markdown"], record.get("job", {}))


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            there, here = (
                item.sha256[:12] if isinstance(item, Source) else item for item in (old.get(name), new.get(name))
            )
            return f"{name}: there {there}, here {here}"
    return ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("crosstrain", "torch", "torchao", "transformers", "peft", "tokenizers", "fastokens", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run_step(
    component: str,
    *,
    inputs: Mapping[str, Any],
    output: Any,
    config: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    task_config: Any = None,
    metrics: Any = None,
    html: Any = None,
    markdown: Any = None,
) -> Result:
    """Run a component from its KFP face.

    Args:
        component: Folder name: "merge"; of a package of your own its full name: "acme.steps.clean".
        inputs: Config field to KFP input artifact, or to a list of them (None: an optional one that was not given).
        output: KFP output artifact; its file becomes the manifest, its metadata the facts' headline.
        config: Further options, which win over `options`: this component's own mapping of field to value, or
            the pipeline-wide mapping of component to such mappings.
        options: Options that the face has as parameters.
        task_config: KFP's TaskConfig with what the user set on the task, for components that launch jobs.
        metrics: KFP output artifact of this type, where the face has one.
        html: Likewise.
        markdown: Likewise.
    """
    task = os.environ.get(telemetry.TASK_VARIABLE) or os.path.basename(os.path.dirname(output.path)) or component
    telemetry.start(task)
    telemetry.emit("start", component=component)
    try:
        values = {
            **select_options(component, config, given=options or {}),
            **{name: _uri(artifact) for name, artifact in inputs.items() if artifact is not None},
        }
        if task_config is not None:
            values["run_on"] = _with_task(values.get("run_on") or {}, task_config)
        config_class = load_config(component)
        (output_field,) = config_class.uris(OUTPUT)
        values[output_field] = output.uri + DATA_SUFFIX
        result = execute(component, config_class.decode(values, where=component))
    except Exception as error:
        log.exception("%s failed", component)
        telemetry.emit("failed", error=f"{type(error).__name__}: {error}")
        raise
    artifacts = {name: place for name, place in values.items() if name in inputs and isinstance(place, str)}
    _publish(result, output, metrics, html, markdown, {**artifacts, output_field: result.artifact.uri})
    telemetry.emit("done", uri=result.artifact.uri, metrics=finite(result.metrics))
    return result


def _uri(artifact: Any) -> Any:
    return [_uri(one) for one in artifact] if isinstance(artifact, list) else artifact.uri + DATA_SUFFIX


def _with_task(run_on: Mapping[str, Any], task_config: Any) -> dict[str, Any]:
    """`run_on` with the settings of the KFP task that were made."""
    made = {name: value for name, value in vars(task_config).items() if value}
    if made and run_on.get("task_config"):
        raise ValueError("run_on.task_config is filled from the KFP task's own settings; leave it out")
    return {**run_on, "task_config": made} if made else dict(run_on)


def select_options(component: str, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A component's options out of its own or the pipeline-wide mapping, over those given as parameters.

    The mapping wins over a parameter of the same name, because a pipeline does not expose every parameter of
    every step; the log says so.

    Raises:
        ValueError: the mapping names an unknown component beside known ones.
    """
    known = {*COMPONENTS, component}
    if any(name in known or "." in name for name in config):  # an option's name has no dot, a package's has
        unknown = [name for name in config if name not in known and "." not in name]
        if unknown:
            raise ValueError(f"config: unknown component {unknown[0]!r}; known: {', '.join(COMPONENTS)}")
        config = config.get(component) or {}
    for name in sorted(set(config) & set(given)):
        if config[name] != given[name]:
            log.info("%s: config sets %s=%r over the parameter's %r", component, name, config[name], given[name])
    return {**given, **config}


def _publish(result: Result, output: Any, metrics: Any, html: Any, markdown: Any, artifacts: Mapping[str, str]) -> None:
    manifest = result.artifact.manifest
    _write(output.path, manifest.encode())
    output.metadata.update(
        {"kind": manifest.kind, "sha256": manifest.sha256, "manifest": f"{result.artifact.uri}/{MANIFEST_NAME}"}
    )
    if metrics is not None:
        for name, value in finite(result.metrics).items():
            metrics.log_metric(name, value)
    if html is not None:
        _write(html.path, result.html.encode())
    if markdown is not None:
        from crosstrain.components.core.links import with_links  # of the eval extra, as what writes Markdown is

        _write(markdown.path, with_links(result.markdown, result.artifact.uri, artifacts).encode())


def _write(path: str, data: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)


def main(component: str, argv: Sequence[str] | None = None) -> None:
    """Run a component from the command line: status 0, or 1 with one `error:` line; 2 for unknown options."""
    telemetry.start(component)
    try:
        config = parse_arguments(load_config(component), f"python -m {package_of(component)}", argv)
        result = execute(component, config)
    except (ValueError, OSError) as error:
        log.debug("traceback", exc_info=True)
        sys.exit(f"error: {error}")
    for name, value in sorted(finite(result.metrics).items()):
        log.info("%s = %.6g", name, value)
    log.info("%s at %s", result.artifact.manifest.kind, result.artifact.uri)
