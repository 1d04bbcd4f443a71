"""Run files: read strictly, named by their content."""

import re
from pathlib import Path

import pytest

from crosstrain.pipelines import run_file

GOOD = """
name: one
experiment: demo
pipelineVersion: pretrain-finetune-0123456789ab
parameters: {corpus: s3://b/c, steps: 3}
"""
KEY = re.compile(r"[0-9a-f]{64}")


def key(text: str, tmp_path: Path, namespace: str = "team") -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return run_file.read(path).key(namespace)


def test_a_run_file_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nexperiment: b\nattempt: 1\nparameters: {text: d}\n")
    assert run_file.read(path).parameters == {"text": "d"}
    path.write_text("name: a\n")
    assert run_file.read(path).parameters == {}
    for text, message in {
        "paramters: {}": "unknown key 'paramters'; did you mean 'parameters'?",
        "parameters: [1]": "parameters: expected a mapping, found list",
        "- 1": "expected a mapping with `parameters`, found list",
        "": "found nothing",
        "a: [": "not YAML",
        "name: a\nname: b": "the key 'name' stands twice",
        "parameters:\n  a: 1\n  a: 2": "the key 'a' stands twice",
        "name: Über": "name: String should match pattern",
        "pipelineVersion: latest": "pipelineVersion: String should match pattern",
        "attempt: 0": "attempt: Input should be greater than or equal to 1",
        "attempt: '1'": "attempt: Input should be a valid integer",
        "parameters: {day: 2026-01-01}": "quote dates",
        "parameters: {rate: .nan}": "parameters: Out of range float values",
        "schedule: {}": "give either cron or interval_seconds",
        "schedule: {cron: '0 2 * * *'}": "has 5 fields; KFP wants six",
        "schedule: {interval_seconds: 60, evry: 1}": "schedule.evry",
        "schedule: {interval_seconds: 60, start: 2026-01-01T00:00:00}": "timezone",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError) as caught:
            run_file.read(path)
        assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such run file"):
        run_file.read(tmp_path / "none.yaml")


def test_the_key_is_the_contents(tmp_path: Path) -> None:
    first = key(GOOD, tmp_path)
    assert KEY.fullmatch(first)
    same = "# a comment\nattempt: 1\nparameters: {steps: 3, corpus: 's3://b/c'}\nexperiment: demo\nname: one\n"
    assert key(same + "pipelineVersion: pretrain-finetune-0123456789ab\n", tmp_path) == first
    others = [
        key(GOOD.replace("steps: 3", "steps: 4"), tmp_path),
        key(GOOD + "attempt: 2\n", tmp_path),
        key(GOOD.replace("0123456789ab", "0123456789ac"), tmp_path),
        key(GOOD, tmp_path, namespace="other"),
        key(GOOD + "schedule: {interval_seconds: 60}\n", tmp_path),
        key(GOOD + "schedule: {interval_seconds: 61}\n", tmp_path),
    ]
    assert len({first, *others}) == 7


def test_a_key_never_changes() -> None:
    """Golden: a release that names the same file otherwise would start every run again."""
    file = run_file.RunFile(
        name="one", experiment="demo", pipelineVersion="pretrain-finetune-0123456789ab", parameters={"corpus": "s3://ü"}
    )
    assert file.key("team") == GOLDEN_KEY
    assert file.display_name("team") == f"one-{GOLDEN_KEY[:12]}"


GOLDEN_KEY = "ef9059a80a9fa9752f34160ecc9aac39b7725019395c29e4a7364f45e89068b1"


def test_a_folder_of_run_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run file"):
        run_file.read_folder(tmp_path)
    (tmp_path / "b.yaml").write_text(GOOD)
    (tmp_path / "kustomization.txt").write_text("not one")
    files, refused = run_file.read_folder(tmp_path)
    assert [path.name for path in files] == ["b.yaml"] and refused == []
    (tmp_path / "c.yml").write_text(GOOD)
    files, refused = run_file.read_folder(tmp_path)
    assert files == {} and len(refused) == 2, "neither is the one that was meant"
    assert re.search(r"c\.yml: the name 'one' is also that of .*b\.yaml", refused[1])
    wrong = [re.sub(f"{member}: .*\n", "", GOOD) for member in ("experiment", "pipelineVersion")]
    for text in (*wrong, GOOD + "atempt: 2\n", "parameters: [", "\x00"):
        (tmp_path / "c.yml").write_text(text)
        files, (line,) = run_file.read_folder(tmp_path)
        assert [path.name for path in files] == ["b.yaml"] and line.startswith(f"{tmp_path / 'c.yml'}: ")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        run_file.read_folder(tmp_path / "none")


def test_a_schedule_as_the_api_takes_it() -> None:
    nightly = run_file.Schedule(cron="0 0 2 * * *", start="2026-01-02T03:04:05Z")  # type: ignore[arg-type]
    assert nightly.trigger() == {"cron_schedule": {"cron": "0 0 2 * * *", "start_time": "2026-01-02T03:04:05Z"}}
    assert run_file.Schedule(interval_seconds=60).trigger() == {"periodic_schedule": {"interval_second": "60"}}
