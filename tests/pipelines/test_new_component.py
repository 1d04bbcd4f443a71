"""The component that is written for a user works at once, in a package of the user's and in this tree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crosstrain.components.core.step import COMPONENTS, package_of, select_options
from crosstrain.pipelines import compile as compiling
from crosstrain.pipelines.cli import main

ROOT = Path(__file__).parents[2]
RUFF = [sys.executable, "-m", "ruff"]


def write(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["new-component", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package acme.steps in the current folder."""
    folder = tmp_path / "acme" / "steps"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    return folder


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_in_a_package_of_ones_own_it_passes_its_test(steps: Path, tmp_path: Path) -> None:
    assert write("clean_text", "--into", "acme/steps") == 0
    done = command(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_clean_text.py")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    helped = command(tmp_path, sys.executable, "-m", "acme.steps.clean_text", "--help")
    assert "--minimum-characters" in helped.stdout
    for check in (["check", "--select", "E,F,B,UP"], ["format", "--check"]):
        checked = command(tmp_path, *RUFF, *check, "--line-length", "120", "acme", "tests")
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", ["clean_text", "score_text"])
def test_in_this_tree_it_joins_the_components(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "components"
    (tree / "core").mkdir(parents=True)
    (tree / "__init__.py").touch()
    (tree / "core" / "step.py").write_bytes((ROOT / "components" / "core" / "step.py").read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(compiling, "source_root", lambda: tmp_path)
    assert write(name, "--into", str(tree)) == 0
    changed: dict[str, object] = {}
    source = (tree / "core" / "step.py").read_text()
    begin = source.index("\nCOMPONENTS = (")
    exec(source[begin : source.index("\n)", begin) + 2], changed)
    assert changed["COMPONENTS"] == (*COMPONENTS, name)
    face = (tree / name / "component.py").read_text()
    assert "base_image=images.DATA" in face
    assert f'"{name}",\n' in face
    assert (tmp_path / "tests" / "components" / name / f"test_{name}.py").is_file()
    for check in (["check"], ["format", "--check"]):
        checked = command(tmp_path, *RUFF, *check, "components", "tests")
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("name", "into", "told"),
    [
        ("Clean", "acme/steps", "lower-case letters"),
        ("class", "acme/steps", "lower-case letters"),
        ("merge", "acme/steps", "has a component of that name"),
        ("clean", "acme/nowhere", "no Python package"),
        ("steps", "acme", "is there already"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    name: str, into: str, told: str, steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert write(name, "--into", into) == 2
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_test_that_is_there_is_not_overwritten(
    steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_clean.py").write_text("mine")
    assert write("clean", "--into", "acme/steps") == 2
    assert (tmp_path / "tests" / "test_clean.py").read_text() == "mine"
    assert not (steps / "clean").exists()


def test_the_options_of_a_component_of_ones_own_are_found_beside_ours() -> None:
    config = {"acme.steps.clean": {"minimum_characters": 3}, "merge": {"proof_samples": 1}}
    assert select_options("acme.steps.clean", config, given={}) == {"minimum_characters": 3}
    assert select_options("merge", config, given={}) == {"proof_samples": 1}
    assert select_options("tokenize", {"acme.steps.clean": {"text_field": "a"}}, given={}) == {}
    with pytest.raises(ValueError, match="unknown component 'mrege'"):
        select_options("merge", {"merge": {}, "mrege": {}}, given={})
    assert package_of("merge") == "crosstrain.components.merge"
