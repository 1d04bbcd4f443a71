"""What a run made is told with its lineage, and damage is found wherever it lies."""

import json
from pathlib import Path

import pytest

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import CheckpointFacts, CorpusFacts, PartitionFacts
from crosstrain.components.core.storage import open_store
from crosstrain.pipelines.cli import main


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where artifacts are put: a local folder, or a real S3 server."""
    return str(tmp_path / "run") if request.param == "folder" else request.getfixturevalue("s3_uri")


@pytest.fixture
def corpus(place: str) -> Artifact:
    with ArtifactWriter(f"{place}/z-first/data.data") as writer:
        for name in ("a b.jsonl", "b.jsonl"):
            with writer.create(name) as path:
                path.write_text(f'{{"text": "{name}"}}\n')
        return writer.commit("import_data", CorpusFacts(format="jsonl"), {}, {})


@pytest.fixture
def tokens(place: str, corpus: Artifact) -> Artifact:
    facts = PartitionFacts(partition=0, partitions=1, units=1, documents=2, tokens=9)
    with ArtifactWriter(f"{place}/a-second/tokens.data") as writer:
        with writer.create("part.bin") as path:
            path.write_bytes(b"\1\0" * 9)
        made = writer.commit("tokenize", facts, {"seed": 1}, {"corpus": corpus})
    record = {"seconds": 2.0, "metrics": {"tokens": 9.0, "cost_usd": 0.5, "loss": float("nan")}}
    made.store.write("run.json", json.dumps(record).encode())
    return made


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["show", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_inputs_come_before_what_was_made_from_them(
    place: str, tokens: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = show(capsys, place)
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith("#1  corpus  import_data")
    assert lines[1].startswith("#2  partition  tokenize  from corpus #1  " + tokens.manifest.sha256[:12])
    assert "tokens 9" in out
    assert f"#2 {tokens.uri}" in lines
    assert lines[-1] == "cost: 0.50 USD, of 1 of 2 steps; the others have no price"


def test_the_document_has_full_hashes_and_numbers(
    place: str, corpus: Artifact, tokens: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = show(capsys, place, "--json", "--verify")
    first, second = json.loads(out)["artifacts"]
    assert status == 0
    assert json.loads(out)["damaged"] == []
    assert second["inputs"] == {"corpus": {"kind": "corpus", "sha256": corpus.manifest.sha256, "number": 1}}
    assert (first["objects"], first["bytes"], second["bytes"]) == (2, 42, 18)
    assert second["metrics"] == {"tokens": 9.0, "cost_usd": 0.5}
    assert second["options"] == {"seed": 1}


def test_an_input_that_lies_elsewhere_is_said_to_and_found_with_also(
    place: str, corpus: Artifact, tokens: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = show(capsys, tokens.uri)
    assert f"from corpus {corpus.manifest.sha256[:12]} (elsewhere)" in out
    _, out, _ = show(capsys, tokens.uri, "--also", corpus.uri)
    assert "from corpus #1" in out


def test_checkpoints_are_shown_only_where_they_are_asked_for(
    place: str, tokens: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    with ArtifactWriter(f"{place}/state/step-1") as writer:
        checkpoint = writer.commit("train_fp8", CheckpointFacts(step=1, run_key="0" * 64), {}, {})
    assert "  checkpoint  " not in show(capsys, place)[1]
    assert show(capsys, checkpoint.uri)[1].startswith("#1  checkpoint  ")


@pytest.mark.parametrize(
    ("damage", "told"), [("missing", "missing"), ("cut", "bytes, and the manifest says"), ("changed", "SHA-256")]
)
def test_verify_names_every_damaged_object(
    place: str, corpus: Artifact, tokens: Artifact, damage: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = show(capsys, place, "--verify")
    assert (status, out.splitlines()[-1]) == (0, "verified: 3 objects, 60 B, all as their manifests say")
    store, key = open_store(corpus.uri), "a b.jsonl"
    data = store.read(key)
    if damage == "missing":
        store.delete(key)
    else:
        store.write(key, data[:-1] if damage == "cut" else data.replace(b"a b", b"a c"))
    status, _, err = show(capsys, place, "--verify")
    assert status == 1
    assert f"damaged: {corpus.uri}/{key}: " in err
    assert told in err
    assert "1 of 3 objects" in err
    assert show(capsys, place)[0] == 0


def test_a_place_without_artifacts_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = show(capsys, str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "no artifact here" in err
