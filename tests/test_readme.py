"""The README keeps its word: its examples run, its files exist, its commands are known."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
from kfp import compiler

from crosstrain.pipelines import spec

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_pipeline_compiles(tmp_path):
    names: dict = {}
    # kfp reads a component's source from its file, so the example gets one
    path = tmp_path / "example.py"
    path.write_text(blocks("python")[0])
    exec(compile(path.read_text(), path, "exec"), names)
    compiler.Compiler().compile(names["my_merge"], str(tmp_path / "my_merge.yaml"))
    assert "comp-merge" in (tmp_path / "my_merge.yaml").read_text()


def test_the_example_loads_a_component_from_its_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(blocks("python")[1], names)
    assert names["merge"].name == "merge"


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w[\w-]*)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


RUNS = [line for line in "\n".join(blocks("sh")).splitlines() if line.startswith("crosstrain run ") and "--set" in line]


@pytest.mark.parametrize("line", RUNS)
def test_commands_name_pipelines_and_parameters_that_exist(line):
    words = shlex.split(line)
    pipeline = spec.load(words[2])
    given = {word.partition("=")[0] for before, word in itertools.pairwise(words) if before == "--set"}
    known = {parameter.name: parameter for parameter in pipeline.parameters.values()}
    assert given <= set(known)
    assert {name for name, parameter in known.items() if parameter.required} <= given
