"""A compiled pipeline as data: its name, parameters and tasks, read with a YAML parser alone.

Importing kfp takes seconds; showing a pipeline's parameters or refusing a wrong one should not. The bytes
read here are the very bytes that are run, and their SHA-256 names them.
"""

import hashlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

COMPILED = Path(__file__).parent / "compiled"

ANY = "*"
"""Stands in a task's name for the number of an iteration whose loop goes over what is not known before the run."""

_RUN_STEP = re.compile(r"run_step\(\s*[\"']([\w.]+)[\"']")
_FIELD = re.compile(r'parseJson\(string_value\)\["([^"]+)"\]')
_LONGEST_ITEM = 24
"""Characters of a loop's item that are shown; a longer one is shown by its number."""
_TYPES = {
    "STRING": "text",
    "NUMBER_INTEGER": "integer",
    "NUMBER_DOUBLE": "number",
    "BOOLEAN": "true or false",
    "STRUCT": "mapping",
    "LIST": "list",
}
_FILLED = {"TASK_CONFIG", "TASK_FINAL_STATUS"}
"""Types of parameters that KFP fills by itself, and nobody else may."""


@dataclass(frozen=True)
class Parameter:
    """A parameter as the YAML declares it."""

    name: str
    type: str
    """KFP's name: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT or LIST."""
    required: bool
    default: Any
    """None when there is none."""
    description: str

    @property
    def type_text(self) -> str:
        return _TYPES.get(self.type, self.type)


@dataclass(frozen=True)
class Task:
    """One step, named as the local runner and the step's events name it."""

    name: str
    """Also where its outputs lie; a step of a loop has the iteration before it: for-loop-1-iteration-0/train-fp8."""
    title: str
    """What the KFP UI shows, and of a loop's step the item."""
    component: str
    """The component behind it: crosstrain's own, or the full name of a package made like one; empty: another kind."""
    parameters: dict[str, Any]
    """Parameters whose value is known before the run."""
    later: frozenset[str]
    """Parameters whose value another task makes."""
    artifacts: frozenset[str]
    """Input artifacts that are connected."""
    bindings: dict[str, str]
    """Parameter to the pipeline parameter it is given from."""
    outputs: dict[str, str]
    """Output artifact to its schema title: system.HTML."""


@dataclass(frozen=True)
class Pipeline:
    """A compiled pipeline."""

    name: str
    data: bytes
    description: str
    parameters: dict[str, Parameter]
    document: dict[str, Any]
    platform: dict[str, Any]
    """The platform's part, a document of its own; empty when there is none."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the YAML's bytes, as hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def tasks(self, values: Mapping[str, Any]) -> list[Task]:
        """Every step, those of nested pipelines, branches and iterations included, in an order in which they can run.

        A loop over what only the run will tell gives each of its steps once, with ANY for the iteration's number.

        Args:
            values: Pipeline parameter to value.
        """
        return list(self._walk(self.document["root"], dict(values), {name: name for name in values}, "", ""))

    def _walk(
        self, component: Mapping[str, Any], known: dict[str, Any], origin: dict[str, str], prefix: str, suffix: str
    ) -> Iterator[Task]:
        tasks = component["dag"]["tasks"]
        order = TopologicalSorter({name: sorted(task.get("dependentTasks", ())) for name, task in tasks.items()})
        for key in order.static_order():
            task = tasks[key]
            reference = task["componentRef"]["name"]
            target = self.document["components"][reference]
            given, later, bindings = {}, set(), {}
            declared = target.get("inputDefinitions", {}).get("parameters", {})
            bound = task.get("inputs", {}).get("parameters", {})
            for name, definition in declared.items():
                source = bound.get(name)
                if source is None:
                    if "defaultValue" in definition:
                        given[name] = typed_default(definition)
                    continue
                outer = source.get("componentInputParameter")
                if "runtimeValue" in source:
                    given[name] = source["runtimeValue"]["constant"]
                elif outer in known and (chosen := _choose(known[outer], source)):
                    (given[name],) = chosen
                else:
                    later.add(name)
                if outer in origin:
                    bindings[name] = origin[outer]
            if "dag" in target:
                for folder, title, item in _iterations(key, task, given):
                    yield from self._walk(target, {**given, **item}, bindings, prefix + folder, suffix + title)
                continue
            outputs = target.get("outputDefinitions", {}).get("artifacts", {})
            yield Task(
                name=prefix + reference.removeprefix("comp-"),
                title=task.get("taskInfo", {}).get("name", key) + suffix,
                component=self._component(target),
                parameters=given,
                later=frozenset(later),
                artifacts=frozenset(task.get("inputs", {}).get("artifacts", {})),
                bindings=bindings,
                outputs={name: item["artifactType"].get("schemaTitle", "") for name, item in outputs.items()},
            )

    def _component(self, target: Mapping[str, Any]) -> str:
        executor = self.document["deploymentSpec"]["executors"].get(target.get("executorLabel", ""), {})
        source = " ".join(executor.get("container", {}).get("command", ()))
        found = _RUN_STEP.search(source)
        return found.group(1) if found else ""


def _iterations(
    key: str, task: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """How often a nested DAG runs: folder before its tasks, what is added to their titles, and the item as input."""
    iterator = task.get("parameterIterator") or task.get("artifactIterator")
    if iterator is None:
        yield "", "", {}
        return
    name = task.get("taskInfo", {}).get("name", key)
    label = "" if name == key else f"{name} "
    items = iterator["items"]
    values = json.loads(items["raw"]) if "raw" in items else given.get(items.get("inputParameter", ""))
    if not isinstance(values, list):
        yield f"{key}-iteration-{ANY}/", f", {label}{ANY}", {}
        return
    for number, item in enumerate(values):
        yield f"{key}-iteration-{number}/", f", {label}{_item_text(item, number)}", {iterator["itemInput"]: item}


def _item_text(item: Any, number: int) -> str:
    parts = item.values() if isinstance(item, dict) else [item]
    text = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
    return text if 0 < len(text) <= _LONGEST_ITEM and "/" not in text else str(number)


def _choose(value: Any, source: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an input takes of a known value: the value, a field of it, or nothing that is known here."""
    if (selector := source.get("parameterExpressionSelector")) is None:
        return (value,)
    found = _FIELD.fullmatch(selector)
    return (value[found.group(1)],) if found and isinstance(value, dict) and found.group(1) in value else ()


def typed_default(definition: Mapping[str, Any]) -> Any:
    """A declared default; the compiler writes integers as floats."""
    default = definition.get("defaultValue")
    if definition.get("parameterType") == "NUMBER_INTEGER" and isinstance(default, float):
        return int(default)
    return default


def parse(data: bytes, where: str) -> Pipeline:
    """Read a compiled pipeline's bytes.

    Raises:
        ValueError: the bytes are not a compiled KFP v2 pipeline or component.
    """
    try:
        documents = list(yaml.load_all(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    document = documents[0] if documents else None
    if not isinstance(document, dict) or not {"root", "components", "deploymentSpec", "pipelineInfo"} <= set(document):
        raise ValueError(f"{where}: not a compiled KFP v2 pipeline; compile it with kfp.compiler.Compiler first")
    definitions = document["root"].get("inputDefinitions", {}).get("parameters", {})
    parameters = {
        name: Parameter(
            name=name,
            type=definition["parameterType"],
            required="defaultValue" not in definition,
            default=typed_default(definition),
            description=" ".join(definition.get("description", "").split()),
        )
        for name, definition in definitions.items()
        if definition["parameterType"] not in _FILLED
    }
    info = document["pipelineInfo"]
    return Pipeline(
        name=info["name"],
        data=data,
        description=info.get("description") or _header_description(data),
        parameters=parameters,
        document=document,
        platform=documents[1] if len(documents) > 1 else {},
    )


def _header_description(data: bytes) -> str:
    """The description of the comment that the compiler writes on top: components keep theirs nowhere else."""
    lines: list[str] = []
    for line in data.decode(errors="replace").splitlines():
        if line.startswith("# Description: "):
            lines.append(line.removeprefix("# Description: "))
        elif lines and line.startswith("#" + " " * 14):
            lines.append(line[15:])
        elif lines or not line.startswith("#"):
            break
    return "\n".join(lines).strip()


def committed() -> list[str]:
    """Names of the compiled pipelines that the package carries."""
    return sorted(path.stem for path in COMPILED.glob("*.yaml"))


def load(name: str) -> Pipeline:
    """The compiled pipeline of a name the package carries, or at a path.

    Raises:
        FileNotFoundError: neither.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) or "/" in name else COMPILED / f"{name}.yaml"
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(
            f"{name}: no such pipeline; known: {', '.join(committed()) or 'none'}, or the path of a compiled YAML file"
        )
    return parse(path.read_bytes(), str(path))


def help_pipelines() -> str:
    """The committed pipelines, one a line with what it does."""
    lines = ["\npipelines:"]
    for name in committed():
        lines.append(f"  {name:<22}{load(name).description.splitlines()[0]}")
    return "\n".join(lines)


def help_text(pipeline: Pipeline) -> str:
    """A pipeline's description and its parameters: type, default and meaning."""
    lines = ["", f"{pipeline.name}: {pipeline.description}", "", "parameters:"]
    last = ("state", "config")
    for parameter in sorted(pipeline.parameters.values(), key=lambda item: (not item.required, item.name in last)):
        default = "required" if parameter.required else f"default: {json.dumps(parameter.default)}"
        lines.append(f"  {parameter.name}  ({parameter.type_text}; {default})")
        lines += textwrap.wrap(parameter.description, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    components = dict.fromkeys(task.component for task in pipeline.tasks({}) if task.component)
    if components and "config" in pipeline.parameters:
        lines += [
            "",
            "further options: --set config.COMPONENT.OPTION=VALUE; `python -m crosstrain.components.COMPONENT --help`",
            f"lists them; components: {', '.join(components)}",
        ]
    return "\n".join(lines)
