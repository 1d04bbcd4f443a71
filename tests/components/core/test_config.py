"""Strict decoding, the command line made from a configuration, and its help."""

from typing import Literal

import pytest

from crosstrain.components.core.config import (
    INPUT,
    OUTPUT,
    STATE,
    Config,
    InputURI,
    OutputURI,
    PositiveFloat,
    PositiveInt,
    StateURI,
    parse_arguments,
)
from crosstrain.components.core.step import COMPONENTS, load_config


class Example(Config):
    """Do a thing."""

    model: InputURI
    """Model to do it to."""
    output: OutputURI
    """Where it goes."""
    state: StateURI = ""
    """Where checkpoints are kept."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    precision: Literal["fp8", "bf16"] = "fp8"
    """Number format."""
    steps: PositiveInt | None = None
    """Optimizer steps; none: one epoch."""
    names: tuple[str, ...] = ()
    """Names; 100% of them."""
    shuffle: bool = True
    """Whether to shuffle."""
    extra: dict[str, float] = {}  # noqa: RUF012 - pydantic copies it
    """More numbers."""


GIVEN = {"model": "m", "output": "o"}


def test_roles_and_options():
    assert [Example.uris(role) for role in (INPUT, OUTPUT, STATE)] == [["model"], ["output"], ["state"]]
    options = Example.decode({**GIVEN, "state": "s"}).options()
    assert list(options) == ["learning_rate", "precision", "steps", "names", "shuffle", "extra"]


def test_integral_floats_are_integers_as_kfp_sends_them():
    assert Example.decode({**GIVEN, "steps": 200.0}).steps == 200
    with pytest.raises(ValueError, match=r"example: steps: .*fractional.*10\.5"):
        Example.decode({**GIVEN, "steps": 10.5}, "example")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rte": 1}, "learning_rte: unknown option; did you mean 'learning_rate'"),
        ({"zzz": 1}, "zzz: unknown option; known: model, output"),
        ({"learning_rate": -1}, "learning_rate: Input should be greater than 0"),
        ({"learning_rate": float("nan")}, "learning_rate: Input should be"),
        ({"precision": "fp4"}, "precision: Input should be 'fp8' or 'bf16'"),
    ],
)
def test_bad_values_give_one_clear_error(values, message):
    with pytest.raises(ValueError, match="train: ") as caught:
        Example.decode({**GIVEN, **values}, "train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_listed_at_once():
    with pytest.raises(ValueError, match=r"model: required.*output: required.*steps: "):
        Example.decode({"steps": 0})


def test_command_line(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("model: a\nlearning_rate: 0.5\nshuffle: false\n")
    argv = ["--config", str(file), "--output", "b", "--learning-rate", "0.25", "--names", "x,y", "--extra", '{"k": 1}']
    config = parse_arguments(Example, "example", argv)
    assert config == Example(
        model="a", output="b", learning_rate=0.25, names=("x", "y"), shuffle=False, extra={"k": 1.0}
    )


def test_command_line_refuses_an_unknown_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(Example, "example", ["--model", "a", "--output", "b", "--learning", "1"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --learning" in capsys.readouterr().err


def test_configuration_file_must_be_a_mapping(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("- a\n")
    with pytest.raises(ValueError, match=r"options\.yaml: expected a mapping"):
        parse_arguments(Example, "example", ["--config", str(file)])


@pytest.mark.parametrize("content", [b"steps: 'abc", b"\xff\xfe", b"a: b: c"])
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, content):
    (tmp_path / "options.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"--config \S+options\.yaml: not YAML or JSON: ") as caught:
        parse_arguments(Example, "example", ["--config", str(tmp_path / "options.yaml")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("component", COMPONENTS)
def test_help_shows_every_option_with_text_and_default(component, capsys):
    config = load_config(component)
    with pytest.raises(SystemExit):
        parse_arguments(config, component, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, info in config.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert info.description, f"{component}.{name} has no docstring"
        assert " ".join(info.description.split()).split(" ")[0] in shown
    assert shown.count("[required]") + shown.count("[default: ") >= len(config.model_fields)
