"""Compiling: the same bytes each time, stale files told apart, READMEs complete."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from crosstrain.components.core.config import INPUT, OUTPUT
from crosstrain.components.core.step import COMPONENTS, load_config
from crosstrain.pipelines import compile as compiling
from crosstrain.pipelines import spec

ROOT = Path(__file__).resolve().parents[2]
MERGE = ["components/merge/component.yaml", "components/merge/README.md"]


def test_the_committed_files_are_what_compiling_gives() -> None:
    """Renew them with `crosstrain compile`."""
    assert compiling.stale(compiling.build(), ROOT) + compiling.orphans(ROOT) == []


@pytest.mark.parametrize("name", compiling.PIPELINES)
def test_a_pipeline_explains_itself_in_the_ui(name: str) -> None:
    pipeline = spec.load(name)
    assert pipeline.description
    assert len(pipeline.parameters) <= 12
    assert [item.name for item in pipeline.parameters.values() if not item.description] == []
    assert all(task.title != task.name for task in pipeline.tasks({}))


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_components_files_explain_every_input_and_option(name: str) -> None:
    pipeline = spec.load(str(ROOT / "components" / name / "component.yaml"))
    assert [item.name for item in pipeline.parameters.values() if not item.description] == []
    readme = (ROOT / "components" / name / "README.md").read_text()
    config = load_config(name)
    for field in config.model_fields:
        if field not in (*config.uris(INPUT), *config.uris(OUTPUT)):
            assert f"`{field}`" in readme, field
    assert "| required |  |" not in readme and "` |  |" not in readme, "an option without a description"


def test_the_same_sources_give_the_same_bytes_in_another_process(command: list[str], tmp_path: Path) -> None:
    here = compiling.build(["merge", "import_data"])
    subprocess.run(
        [*command, "compile", "import_data", "merge", "--out", tmp_path / "o"],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
    )
    for name, data in here.items():
        assert (tmp_path / "o" / name).read_bytes() == data
        assert str(ROOT).encode() not in data and os.path.expanduser("~").encode() not in data


def test_a_component_file_is_usable_alone() -> None:
    from kfp import components

    data = compiling.build(["merge"])["components/merge/component.yaml"]
    loaded = components.load_component_from_text(data.decode())
    assert loaded.name == "merge"
    assert set(loaded.component_spec.inputs) == {"model", "adapter", "config"}
    assert "crosstrain/" in yaml.safe_load(data)["deploymentSpec"]["executors"]["exec-merge"]["container"]["image"]


def test_check_tells_stale_missing_and_orphaned_files(tmp_path: Path) -> None:
    files = compiling.build(["merge"])
    assert compiling.write(files, tmp_path) == MERGE
    assert compiling.write(files, tmp_path) == []
    assert compiling.stale(files, tmp_path) == []
    yaml_path, readme = (tmp_path / name for name in MERGE)
    yaml_path.write_bytes(yaml_path.read_bytes().replace(b"name: merge", b"name: marge", 1))
    readme.unlink()
    assert compiling.stale(files, tmp_path) == [
        f"{MERGE[0]}: line {_line(files[MERGE[0]], 'name: merge')}: -'name: marge' +'name: merge'",
        f"{MERGE[1]}: missing",
    ]
    (tmp_path / "pipelines" / "compiled").mkdir(parents=True)
    (tmp_path / "pipelines" / "compiled" / "gone.yaml").touch()
    assert compiling.orphans(tmp_path) == ["pipelines/compiled/gone.yaml: made by no pipeline; delete it"]


def _line(data: bytes, text: str) -> int:
    return next(i for i, line in enumerate(data.decode().splitlines(), 1) if text in line)


def test_the_command_checks_and_writes(crosstrain, tmp_path: Path) -> None:
    missing = crosstrain("compile", "merge", "--check", "--out", "tree")
    assert missing.returncode == 1
    assert missing.stderr.splitlines() == [
        *(f"stale: {name}: missing" for name in MERGE),
        "error: 2 stale files under tree; run `crosstrain compile`",
    ]
    assert not (tmp_path / "tree").exists()
    assert crosstrain("compile", "merge", "--out", "tree").stdout.splitlines() == [
        f"wrote tree/{name}" for name in MERGE
    ]
    assert crosstrain("compile", "merge", "--check", "--out", "tree").returncode == 0
    unknown = crosstrain("compile", "marge")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: marge: no such pipeline or component; known: ")


def test_an_installed_copy_asks_where_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiling.source_root() == ROOT
    monkeypatch.setattr(
        compiling, "__file__", str(tmp_path / "site-packages" / "crosstrain" / "pipelines" / "compile.py")
    )
    with pytest.raises(ValueError, match="--out DIR"):
        compiling.source_root()
