"""A component's configuration: one model class, decoded strictly, from which CLI, help and README are made.

A component declares a `Config` subclass; a field's docstring is its help text and should name unit and
meaning. Fields typed `InputURI`, `InputURIs` and `OutputURI` are artifacts, `StateURI` is where resumable state is
kept, `Workers` how many processes do the work (never what comes out); all others are options, and options alone say
what the work is. pydantic does the decoding, so that ranges live in the type (`Annotated[int, Field(ge=1)]`)
and the error names the field.

Left out on purpose: environment variables and layered configuration files. A step's options come from one
place, so that what the manifest records is all there was.
"""

import argparse
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

INPUT, OUTPUT, SOURCE, STATE, RUNTIME = "input artifact", "output artifact", "source", "state", "runtime"
FILLED = "filled"
"""Role of a field inside another that the program's surroundings fill, and no user."""

InputURI = Annotated[str, Field(json_schema_extra={"role": INPUT})]
InputURIs = Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"role": INPUT})]
"""Several artifacts of one role, in order."""
OutputURI = Annotated[str, Field(json_schema_extra={"role": OUTPUT})]
SourceURI = Annotated[str, Field(min_length=1, json_schema_extra={"role": SOURCE})]
StateURI = Annotated[str, Field(json_schema_extra={"role": STATE})]
Workers = Annotated[int, Field(ge=0, json_schema_extra={"role": RUNTIME})]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Config(BaseModel):
    """Base of every component's configuration: unknown keys are refused, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def decode(cls, values: Mapping[str, Any], where: str = "configuration") -> Self:
        """Build the configuration from plain values, or raise one ValueError that lists every fault.

        Args:
            values: Field name to value; integral floats are taken as integers, as KFP delivers them.
            where: What the values belong to, for the error ("train_fp8", "run.yaml").
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ValueError(_explain(error, where, cls)) from None

    @classmethod
    def uris(cls, wanted: str) -> list[str]:
        """Names of the fields with a role: INPUT, OUTPUT, SOURCE, STATE or RUNTIME."""
        return [name for name, info in cls.model_fields.items() if role(info) == wanted]

    def artifacts(self) -> dict[str, str]:
        """Input artifacts that are given: name to URI; those of a list are numbered, `models_0`."""
        found: dict[str, str] = {}
        for name in self.uris(INPUT):
            value = getattr(self, name)
            if isinstance(value, tuple):
                found |= {f"{name}_{number}": uri for number, uri in enumerate(value)}
            elif value:
                found[name] = value
        return found

    def options(self) -> dict[str, Any]:
        """Every field without a role, as JSON values: what a manifest records."""
        return self.model_dump(
            mode="json", exclude={name for name, info in type(self).model_fields.items() if role(info)}
        )


AnyConfig = TypeVar("AnyConfig", bound=Config)


def role(info: FieldInfo) -> str:
    """What a field is beside an option: INPUT, OUTPUT, SOURCE, STATE, RUNTIME or FILLED; empty: an option."""
    extra = info.json_schema_extra
    return str(extra.get("role", "")) if isinstance(extra, dict) else ""


def _explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    faults = []
    for fault in error.errors(include_url=False):
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, model.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(model.model_fields)}"
            faults.append(f"{name}: unknown option; {hint}")
        elif fault["type"] == "missing":
            faults.append(f"{name}: required, and not given")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            given = f" (given {fault['input']!r})" if name else ""
            faults.append(f"{name}: {message}{given}" if name else message)
    return f"{where}: " + "; ".join(faults)


def parse_arguments(config: type[AnyConfig], program: str, argv: Sequence[str] | None = None) -> AnyConfig:
    """Read a component's configuration from the command line.

    `--config` (a YAML or JSON file, or JSON itself) gives values that single options override. Unknown options end
    the program with status 2, as argparse does.

    Raises:
        ValueError: a value is refused by the configuration, or the file is not a mapping.
    """
    import yaml  # a step that KFP runs needs none

    parser = argparse.ArgumentParser(
        prog=program,
        description=config.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file with options, or JSON itself; the command line wins"
    )
    for name, info in config.model_fields.items():
        add_option(parser, name, info)
    given = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    values: dict[str, Any] = {}
    if path := given.pop("config", None):
        inline = path.lstrip().startswith("{")
        try:
            loaded = json.loads(path) if inline else yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"--config {path}: not YAML or JSON: {' '.join(str(error).split())}") from None
        if not isinstance(loaded, dict):
            raise ValueError(f"{path}: expected a mapping of option to value, found {type(loaded).__name__}")
        values = loaded
    return config.decode({**values, **given}, where=program)


def add_option(parser: argparse.ArgumentParser, name: str, info: FieldInfo) -> None:
    """Add one field as `--name`, with its docstring, choices and default in the help."""
    flag = "--" + name.replace("_", "-")
    text = f"{describe(info)} [{default_text(info)}]".replace("%", "%%")
    kind = plain_type(info)
    if kind is bool:
        parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif get_origin(kind) is Literal:
        parser.add_argument(flag, dest=name, choices=[str(c) for c in get_args(kind)], help=text)
    else:
        convert, metavar = _converter(kind)
        parser.add_argument(flag, dest=name, type=convert, metavar=metavar, help=text)


def _converter(kind: Any) -> tuple[Callable[[str], Any], str]:
    if get_origin(kind) in (tuple, list):
        return lambda text: [part for part in text.split(",") if part], "A,B,…"
    if get_origin(kind) is dict or kind is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return json.loads, "JSON"
    return str, {int: "INT", float: "FLOAT", str: "TEXT"}.get(kind, "VALUE")


def plain_type(info: FieldInfo) -> Any:
    """A field's type without `| None` and without Annotated."""
    kind = info.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def type_text(info: FieldInfo) -> str:
    """A field's type as a reader of a table wants it: `int`, `fp8 | bf16`, `list`."""
    kind = plain_type(info)
    if get_origin(kind) is Literal:
        return " | ".join(str(choice) for choice in get_args(kind))
    origin = get_origin(kind) or kind
    return {tuple: "list"}.get(origin, getattr(origin, "__name__", str(origin)))


def describe(info: FieldInfo) -> str:
    """A field's docstring on one line."""
    return " ".join((info.description or "").split())


def default_text(info: FieldInfo) -> str:
    """`required`, or `default: …`."""
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    text = default.model_dump_json(exclude_defaults=True) if isinstance(default, BaseModel) else json.dumps(default)
    return f"default: {text}"
