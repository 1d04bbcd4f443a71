"""What a run is going to train, and where: read from its parameters as the steps themselves will read them."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from crosstrain.components.core.config import INPUT, OUTPUT, plain_type
from crosstrain.components.core.findings import Finding, error
from crosstrain.components.core.hub import SCHEME, download, read_address
from crosstrain.components.core.launch.instances import Instance, load_instances
from crosstrain.components.core.launch.job import Job, RunOn
from crosstrain.components.core.launch.plan import processes_per_node
from crosstrain.components.core.presets import read_shape
from crosstrain.components.core.step import COMPONENTS, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.preflight.config import Config

PRETRAIN, TUNE = "train_fp8", "finetune_lora"
PLACEHOLDER = "a-step-before"
"""Stands for inputs that the run has yet to make."""


@dataclass(frozen=True)
class Training:
    """One training step of the run."""

    component: str
    config: Any
    """Its configuration, as the step decodes it."""
    run_on: RunOn
    instance: Instance | None
    """What a node has; None: no instance type was named."""
    processes: int
    """On all nodes."""
    shape: Mapping[str, Any]
    """The model's configuration by Hugging Face's names; empty when it is not known."""
    vocab: int
    """Entries of its vocabulary; 0: not known."""
    sequence_length: int
    """0: not known."""

    @property
    def on_cluster(self) -> bool:
        return self.run_on.target != "local"


def trainings(config: Config) -> tuple[list[Training], list[Finding]]:
    """The run's training steps, and what is wrong with the configuration of any step."""
    made, findings = [], []
    if any(name in COMPONENTS for name in config.sections):
        for name in config.sections:
            if name not in COMPONENTS:
                findings.append(error(f"config.{name}", "no such component", f"known: {', '.join(COMPONENTS)}"))
    for component in COMPONENTS:
        try:
            if component == PRETRAIN and config.preset:
                made.append(_pretraining(config))
            elif component == TUNE and config.tune_steps:
                made.append(_tuning(config))
            elif component in config.sections and component != "preflight":
                _decode(component, config, {})
        except (ValueError, OSError) as fault:
            findings.append(error(component, str(fault).removeprefix(f"{component}: "), "correct the run's parameters"))
    return made, findings


def _decode(component: str, config: Config, given: Mapping[str, Any]) -> Any:
    """A step's configuration, with stand-ins for what the run has yet to make."""
    kind = load_config(component)
    artifacts = {*kind.uris(INPUT), *kind.uris(OUTPUT)}
    stand_ins = {
        name: _stand_in(info) for name, info in kind.model_fields.items() if name in artifacts or info.is_required()
    }
    return kind.decode({**stand_ins, **given, **(config.sections.get(component) or {})}, where=component)


def _stand_in(info: FieldInfo) -> Any:
    kind = plain_type(info)
    if get_origin(kind) in (tuple, list):
        return (PLACEHOLDER,)
    return 1 if kind in (int, float) else get_args(kind)[0] if get_origin(kind) is Literal else PLACEHOLDER


def _pretraining(config: Config) -> Training:
    given = {"preset": config.preset, "precision": config.precision, "steps": config.train_steps}
    step = _decode(PRETRAIN, config, {name: value for name, value in given.items() if value})
    shape = read_shape(step.preset, step.model_config_json)
    return _training(PRETRAIN, step, shape, config.vocab_size, config.sequence_length)


def _tuning(config: Config) -> Training:
    given = {"method": config.method, "rank": config.rank, "steps": config.tune_steps}
    step = _decode(TUNE, config, {name: value for name, value in given.items() if value})
    if config.model:
        shape = _read_model(config.model)
        return _training(TUNE, step, shape, int(shape.get("vocab_size", 0)), config.sequence_length)
    return _training(TUNE, step, _base_shape(config), config.vocab_size, config.sequence_length)


def _base_shape(config: Config) -> Mapping[str, Any]:
    """Of the model that the run pre-trains, empty if it does not; what is wrong with that step, the step's own says."""
    if not config.preset:
        return {}
    try:
        base = _decode(PRETRAIN, config, {"preset": config.preset})
        return read_shape(base.preset, base.model_config_json)
    except ValueError:
        return {}


def _read_model(uri: str) -> Mapping[str, Any]:
    """A model's config.json; what is not there, the storage checks tell."""
    try:
        if uri.startswith(SCHEME):
            with tempfile.TemporaryDirectory() as scratch:
                download(read_address(uri), Path(scratch) / "model", ["config.json"])
                found = json.loads((Path(scratch) / "model/config.json").read_bytes())
        else:
            found = json.loads(open_store(uri).read("config.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _training(component: str, step: Any, shape: Mapping[str, Any], vocab: int, sequence_length: int) -> Training:
    run_on: RunOn = step.run_on
    instance = load_instances(run_on.instances_file).find(run_on.instance_type) if run_on.instance_type else None
    job = Job(run=PLACEHOLDER, task=component, module=component, run_on=run_on)
    processes = run_on.nodes * processes_per_node(job)
    return Training(component, step, run_on, instance, processes, shape, vocab, sequence_length)


def locations(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Where the run reads and writes: what it is, its URI, and whether it is written."""
    yield "artifacts", config.output, True
    if config.state:
        yield "state", config.state, True
    for name in ("corpus", "tuning_corpus", "model"):
        if uri := getattr(config, name):
            yield name, uri, False
