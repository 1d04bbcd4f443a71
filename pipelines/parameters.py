"""A run's parameters: a run file and `--set`, decoded by the types the pipeline declares, refused before anything runs.

Every crosstrain step's configuration is decoded here as the step will decode it, so that a misspelt option of
the last step does not wait for the first ones. Left out: whether the data exists; the import steps, which come
first, say so. And for a cluster, components of packages that are not installed here: their steps say so there.
"""

import copy
import importlib.util
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstrain.components.core.config import INPUT, OUTPUT, SOURCE, STATE, type_text
from crosstrain.components.core.step import COMPONENTS, load_config, select_options
from crosstrain.pipelines.run_file import kind, nearest
from crosstrain.pipelines.spec import Parameter, Pipeline, Task

MAX_BYTES = 100_000
"""Of all parameters as JSON: a step gets them in one argument, which Linux caps at 128 KiB."""


def collect(pipeline: Pipeline, file_values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """What the user gave, by the declared types; `--set` wins over the file, a later one over an earlier one.

    Args:
        pipeline: Whose parameters they are.
        file_values: `parameters` of the run file.
        settings: `name=value`, or `name.key.key=value` to reach into a mapping.

    Raises:
        ValueError: a name is unknown, or a value is not of its type.
    """
    given: dict[str, Any] = {}
    for name, value in file_values.items():
        given[name] = _typed(_known(pipeline, str(name)), value)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: expected NAME=VALUE")
        name, *keys = path.strip().split(".")
        parameter = _known(pipeline, name)
        if not keys:
            given[name] = _typed(parameter, text)
            continue
        if parameter.type != "STRUCT":
            raise ValueError(f"--set {setting}: {name} is {parameter.type_text}, not a mapping, and has no {keys[0]!r}")
        given[name] = copy.deepcopy(given.get(name, parameter.default or {}))
        _put(given[name], keys, _loose(text), setting)
    return given


def complete(pipeline: Pipeline, given: Mapping[str, Any], state: Path) -> dict[str, Any]:
    """Every parameter's value for a local run: defaults filled in, local paths absolute, each step's options checked.

    Args:
        pipeline: What will run.
        given: As `collect` returns it.
        state: Absolute path for the pipeline's `state` parameter, if it has one and it was not given.

    Raises:
        ValueError: a required parameter is missing, a step would refuse its configuration, or is not installed.
    """
    values = fill(pipeline, given)
    for task in pipeline.tasks(values):
        if task.component and not _installed(task.component):
            raise ValueError(
                f"step {task.name} is of component {task.component}, which Python does not find here; install its "
                "package, or put the folder that holds it on PYTHONPATH"
            )
    if values.get("state") == "" and "state" not in given:
        values["state"] = str(state)
    for task in _own_tasks(pipeline, values):
        _make_absolute(task, values)
    return values


def fill(pipeline: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter's value, defaults filled in, each step's options checked.

    Args:
        pipeline: What will run.
        given: As `collect` returns it.

    Raises:
        ValueError: a required parameter is missing, or a step would refuse its configuration.
    """
    missing = [parameter for name, parameter in pipeline.parameters.items() if parameter.required and name not in given]
    if missing:
        listed = "; ".join(f"{item.name} ({item.description or item.type_text})" for item in missing)
        raise ValueError(f"{pipeline.name}: not given: {listed}")
    values = {name: copy.deepcopy(given.get(name, item.default)) for name, item in pipeline.parameters.items()}
    _check_sections(values.get("config"), {task.component for task in pipeline.tasks(values) if task.component})
    for task in _own_tasks(pipeline, values):
        _check_task(task)
    if len(json.dumps(values).encode()) > MAX_BYTES:
        raise ValueError(f"the parameters take more than {MAX_BYTES} bytes as JSON; put what is long into a file")
    return values


def check_remote(pipeline: Pipeline, given: Mapping[str, Any]) -> None:
    """Refuse what a run on a cluster would stumble over: all that `fill` refuses, and paths of this machine.

    An absolute path may be a volume that is mounted there, and is let through.

    Raises:
        ValueError: as said.
    """
    values = fill(pipeline, given)
    for task in _own_tasks(pipeline, values):
        for location in _locations(task, values):
            if location and "://" not in location and not location.startswith("/"):
                raise ValueError(f"{location}: a path of this machine, which no step on a cluster sees; give s3://…")


def _own_tasks(pipeline: Pipeline, values: Mapping[str, Any]) -> list[Task]:
    return [task for task in pipeline.tasks(values) if task.component and _installed(task.component)]


def _installed(component: str) -> bool:
    """Whether the package of a component is here; one without a dot has to be one of ours, or nothing fits."""
    if "." not in component:
        return True
    try:
        return importlib.util.find_spec(f"{component}.config") is not None
    except ModuleNotFoundError:
        return False


def _known(pipeline: Pipeline, name: str) -> Parameter:
    if name not in pipeline.parameters:
        raise ValueError(f"{pipeline.name}: unknown parameter {name!r}; {nearest(name, pipeline.parameters)}")
    return pipeline.parameters[name]


def _typed(parameter: Parameter, value: Any) -> Any:
    """A value, given as text or by YAML, as its declared type."""
    try:
        return _DECODERS[parameter.type](value)
    except (ValueError, TypeError):
        hint = "; quote it" if parameter.type == "STRING" else ""
        raise ValueError(f"{parameter.name}: expected {parameter.type_text}, got {value!r}{hint}") from None


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError
    return int(value)


def _double(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise TypeError
    return float(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise TypeError
    return value


def _container(kind: type, value: Any) -> Any:
    decoded = json.loads(value, parse_constant=_refuse_constant) if isinstance(value, str) else value
    if not isinstance(decoded, kind):
        raise TypeError
    json.dumps(decoded, allow_nan=False)
    return decoded


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


_DECODERS = {
    "STRING": _string,
    "NUMBER_INTEGER": _integer,
    "NUMBER_DOUBLE": _double,
    "BOOLEAN": _boolean,
    "STRUCT": lambda value: _container(dict, value),
    "LIST": lambda value: _container(list, value),
}


def _loose(text: str) -> Any:
    """The value of a key inside a mapping: JSON, or else the text itself."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return text


def _put(mapping: dict[str, Any], keys: Sequence[str], value: Any, setting: str) -> None:
    for key in keys[:-1]:
        mapping = mapping.setdefault(key, {})
        if not isinstance(mapping, dict):
            raise ValueError(f"--set {setting}: {key} is {mapping!r} already, not a mapping")
    mapping[keys[-1]] = value


def _check_sections(config: Any, components: Collection[str]) -> None:
    """Refuse a section of `config` that no step would read."""
    if not isinstance(config, dict) or not components or (len(components) == 1 and not set(config) & set(components)):
        return
    for name in config:
        if name not in components:
            raise ValueError(f"config: no step of this pipeline is {name!r}; {nearest(str(name), sorted(components))}")
        if not isinstance(config[name], dict):
            raise ValueError(f"config.{name}: expected a mapping of option to value, found {kind(config[name])}")


def _check_task(task: Task) -> None:
    """Decode one step's configuration as the step itself will, if all of it is known before the run."""
    if "." not in task.component and task.component not in COMPONENTS:
        raise ValueError(f"step {task.name} is of component {task.component!r}, which this crosstrain does not have")
    config = load_config(task.component)
    if task.later & set(config.model_fields):
        return
    given = {name: value for name, value in task.parameters.items() if name in config.model_fields}
    artifacts: dict[str, Any] = {name: f"{task.name}/{name}" for name in config.uris(OUTPUT)}
    for name in set(config.uris(INPUT)) & task.artifacts:
        several = type_text(config.model_fields[name]) == "list"
        artifacts[name] = [f"{task.name}/{name}"] if several else f"{task.name}/{name}"
    config.decode(
        {
            **select_options(task.component, task.parameters.get("config") or {}, given),
            **artifacts,
        },
        where=task.component,
    )


def _make_absolute(task: Task, values: dict[str, Any]) -> None:
    """Make the local paths absolute that this step reads or keeps its state in."""
    section = (values.get("config") or {}).get(task.component, {})
    for name in _location_fields(task):
        if name in task.bindings:
            values[task.bindings[name]] = _absolute(values[task.bindings[name]])
        if name in section:
            section[name] = _absolute(section[name])


def _locations(task: Task, values: Mapping[str, Any]) -> Iterator[str]:
    """Where this step reads from or keeps its state, as far as the run says."""
    section = (values.get("config") or {}).get(task.component, {})
    for name in _location_fields(task):
        found = section[name] if name in section else values[task.bindings[name]] if name in task.bindings else ""
        if isinstance(found, str):
            yield found


def _location_fields(task: Task) -> list[str]:
    config = load_config(task.component)
    roles = {*config.uris(INPUT), *config.uris(SOURCE), *config.uris(STATE)}
    return [name for name in config.model_fields if name in roles or name.endswith("_uri")]


def _absolute(location: Any) -> Any:
    if not isinstance(location, str) or not location or "://" in location:
        return location
    return str(Path(location).expanduser().absolute())
