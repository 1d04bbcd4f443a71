"""The command's face: quick help, one line for a user's error, the right status."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

SLOW_IMPORTS = ("kfp", "torch", "pydantic", "rich", "minio", "numpy")


def imported_by(*arguments: str) -> list[str]:
    """Slow libraries that a call of `crosstrain` imports."""
    code = (
        "import sys\nfrom crosstrain.pipelines.cli import main\n"
        f"try: main({list(arguments)!r})\nexcept SystemExit: pass\n"
        f"print(*[name for name in {SLOW_IMPORTS!r} if name in sys.modules], file=sys.stderr)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.split()


def test_help_imports_nothing_slow(compiled: dict[str, Path]) -> None:
    assert imported_by("--help") == []
    assert imported_by("run", "--help") == []
    assert imported_by("run", str(compiled["words"]), "--help") == []


def test_help_lists_the_commands_and_the_pipelines(crosstrain) -> None:
    shown = crosstrain("--help").stdout
    assert "run a compiled pipeline on this machine" in shown and "compile pipelines" in shown
    assert crosstrain("--version").stdout == f"crosstrain {version('crosstrain')}\n"


def test_a_pipelines_help_lists_its_parameters(crosstrain, compiled: dict[str, Path]) -> None:
    shown = crosstrain("run", compiled["words"], "--help").stdout
    assert "words: Carry words from one step to the next." in shown
    assert "  text  (text; required)\n      The words.\n" in shown
    assert "  count  (integer; default: 3)\n      How many.\n" in shown
    assert '  mapping  (mapping; default: {"a": {"b": 1.0}})' in shown
    assert "further options" not in shown
    assert "components: import_data, import_model, merge" in crosstrain("run", compiled["crossing"], "-h").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("rum",), "invalid choice: 'rum'"),
        (("run",), "the following arguments are required: PIPELINE"),
        (("run", "wrods"), "error: wrods: no such pipeline; known: "),
        (("run", "none.yaml"), "error: none.yaml: no such pipeline"),
        (("run", "{words}", "--se", "a=b"), "unrecognized arguments: --se"),
        (("run", "{words}"), "error: words: not given: text"),
        (("run", "{words}", "--set", "txt=a"), "did you mean 'text'?"),
        (("run", "{words}", "-f", "none.yaml"), "error: none.yaml: no such run file"),
        (("run", "{words}", "--set", "text=a", "--out", "/proc/nowhere"), "cannot write the output here"),
        (("run", "{containing}"), "error: containing: step shell is a container"),
        (("run", "{use}"), "error: use: takes an artifact (data)"),
    ],
)
def test_a_users_error_is_one_line(
    crosstrain, compiled: dict[str, Path], arguments: tuple[str, ...], message: str
) -> None:
    done = crosstrain(*(argument.format(**compiled) for argument in arguments))
    assert done.returncode == 2
    *usage, last = done.stderr.splitlines()
    assert message in last and "error: " in last
    assert all(line.startswith(("usage:", " ")) for line in usage)
    assert done.stdout == ""
