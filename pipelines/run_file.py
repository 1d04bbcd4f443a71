"""A run, declared in a YAML file: read strictly, and named by its content.

`crosstrain run -f` takes the `parameters` alone; `submit` and `apply` take all of it. The key that makes a
submission happen once is the SHA-256 of the file's canonical JSON with the namespace: a comment, the order of
keys or a default written out change nothing, an edited parameter or a raised `attempt` makes another run.
Left out: whether the pipeline knows the parameters (parameters.py).
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import AwareDatetime, Field, StrictBool, StrictInt, model_validator

from crosstrain.components.core.config import Config

SUFFIXES = (".yaml", ".yml")
KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml")
"""Files that lie beside run files in a folder that kustomize builds, and are none."""


class Schedule(Config):
    """When a recurring run starts: `cron` or `interval_seconds`."""

    cron: str = ""
    """Six fields, seconds first, in the server's time zone: '0 0 2 * * *' is every night at two."""
    interval_seconds: StrictInt = Field(0, ge=0)
    """Seconds from one start to the next."""
    start: AwareDatetime | None = None
    """No run before this moment."""
    end: AwareDatetime | None = None
    """No run after this moment."""
    max_concurrency: StrictInt = Field(1, ge=1, le=10)
    """Runs of this schedule at once."""
    catchup: StrictBool = False
    """Start the runs that were missed while the schedule was paused."""

    @model_validator(mode="after")
    def _one_trigger(self) -> Self:
        if bool(self.cron) == bool(self.interval_seconds):
            raise ValueError("give either cron or interval_seconds")
        if self.cron and len(self.cron.split()) != 6:
            raise ValueError(f"cron {self.cron!r} has {len(self.cron.split())} fields; KFP wants six, seconds first")
        return self

    def trigger(self) -> dict[str, Any]:
        """As the API takes it."""
        times = {
            f"{name}_time": moment.isoformat().replace("+00:00", "Z")
            for name, moment in (("start", self.start), ("end", self.end))
            if moment is not None
        }
        if self.cron:
            return {"cron_schedule": {"cron": self.cron, **times}}
        return {"periodic_schedule": {"interval_second": str(self.interval_seconds), **times}}


class RunFile(Config):
    """What a run file may hold."""

    name: str = Field("", pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$", max_length=80)
    """Lower-case letters, digits and dashes; the run's display name begins with it."""
    experiment: str = Field("", max_length=100)
    """Experiment of the UI that the run is filed under."""
    pipelineVersion: str = Field("", pattern=r"^([a-z0-9][a-z0-9-]*-[0-9a-f]{12})?$")
    """`<pipeline>-<hash>`; `crosstrain compile --versions` prints the names of this crosstrain's pipelines."""
    attempt: StrictInt = Field(1, ge=1)
    """Raise it to run the same again."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Pipeline parameters; what is not given has the pipeline's default."""
    schedule: Schedule | None = None
    """Start runs again and again instead of once."""

    @property
    def pipeline_name(self) -> str:
        """The pipeline's part of `pipelineVersion`."""
        return self.pipelineVersion.rpartition("-")[0]

    def key(self, namespace: str) -> str:
        """What this file asks for in a namespace, as 64 hexadecimal digits."""
        content = {"file": self.model_dump(mode="json", exclude_defaults=True), "namespace": namespace}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def display_name(self, namespace: str) -> str:
        """The name that the run has in the UI, and is found again by."""
        return f"{self.name}-{self.key(namespace)[:12]}"


def read(path: Path) -> RunFile:
    """A run file, decoded strictly.

    Raises:
        ValueError: it is no YAML mapping, repeats or misspells a key, or a value does not fit.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such run file")
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected a mapping with `parameters`, found {kind(loaded)}")
    for name in loaded:
        if name not in RunFile.model_fields:
            raise ValueError(f"{path}: unknown key {name!r}; {nearest(str(name), RunFile.model_fields)}")
    loaded = {name: value for name, value in loaded.items() if value is not None}
    values = loaded.get("parameters", {})
    if not isinstance(values, dict):
        raise ValueError(f"{path}: parameters: expected a mapping, found {kind(values)}")
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: parameters: {error}; quote dates, and leave out what is no number") from None
    return RunFile.decode(loaded, where=str(path))


def read_folder(folder: Path) -> tuple[dict[Path, RunFile], list[str]]:
    """Every run file of a folder that is fit for a cluster, by path, and what is wrong with the others, a line each.

    A file is refused alone: it is wrong or lacks what a cluster needs. Files of one name are all refused.

    Raises:
        FileNotFoundError: there is no such folder, or no run file in it.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of run files")
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in SUFFIXES and not path.name.startswith(".") and path.name not in KUSTOMIZATIONS
    )
    if not paths:
        raise FileNotFoundError(f"{folder}: holds no run file (*.yaml)")
    files: dict[Path, RunFile] = {}
    refused: list[str] = []
    for path in paths:
        try:
            files[path] = _complete(path)
        except (ValueError, OSError) as error:
            refused.append(str(error))
    for path, file in tuple(files.items()):
        others = [str(other) for other in files if other != path and files[other].name == file.name]
        if others:
            refused.append(f"{path}: the name {file.name!r} is also that of {', '.join(others)}")
    names = [file.name for file in files.values()]
    return {path: file for path, file in files.items() if names.count(file.name) == 1}, refused


def _complete(path: Path) -> RunFile:
    file = read(path)
    for member in ("name", "experiment", "pipelineVersion"):
        if not getattr(file, member):
            hint = "; `crosstrain compile --versions` prints it" if member == "pipelineVersion" else ""
            raise ValueError(f"{path}: {member} is missing{hint}")
    return file


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at what was meant."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"


def kind(value: Any) -> str:
    """A YAML value's type, for a message."""
    return "nothing" if value is None else type(value).__name__


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a repeated key is an error, where PyYAML lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep=deep)
