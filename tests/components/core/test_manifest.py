"""A manifest's strictness, and that its bytes name what it says."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.components.core.manifest import (
    CheckpointFacts,
    CorpusFacts,
    File,
    Manifest,
    Source,
    decode,
    finite,
)

SHA = "0123456789abcdef" * 4


def make(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "component": "import_data",
        "facts": CorpusFacts(format="jsonl"),
        "files": (File(path="a/b.jsonl", bytes=3, sha256=SHA), File(path="ü +%.jsonl", bytes=0, sha256=SHA)),
        "options": {"field": "text", "limit": 1.5, "names": ["a"], "none": None},
        "inputs": {"source": Source(kind="corpus", sha256=SHA)},
    }
    return Manifest(**{**values, **changes})


def spoil(*path: str | int, value: Any) -> bytes:
    """A manifest's bytes with one value put in; `...` takes it out."""
    tree = json.loads(make().encode())
    place = tree
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(tree).encode()


def test_what_is_encoded_decodes_to_the_same() -> None:
    manifest = make()
    again = decode(manifest.encode(), "here")
    assert again == manifest
    assert hash(again) == hash(manifest)
    assert again.files == manifest.files
    assert again.sha256 == manifest.sha256 == hashlib.sha256(manifest.encode()).hexdigest()
    assert again.source() == Source(kind="corpus", sha256=manifest.sha256)
    assert manifest != make(component="import_model")


def test_canonical_bytes_are_pinned() -> None:
    assert make().sha256 == "cac08b665eeb88374f63fcc2d4cca78816cece60775bfcf2157147f7f41576ef"


def test_order_of_options_does_not_matter() -> None:
    assert make(options={"a": 1, "b": 2}).encode() == make(options={"b": 2, "a": 1}).encode()


def test_the_name_is_that_of_the_stored_bytes() -> None:
    """A field that a later version adds with a default must not rename artifacts that exist."""
    facts = {"kind": "checkpoint", "step": 3, "run_key": SHA}
    stored = spoil("facts", value=facts)
    assert decode(stored, "here").facts == CheckpointFacts(step=3, run_key=SHA)
    assert decode(stored, "here").sha256 == hashlib.sha256(stored).hexdigest()
    assert decode(stored, "here").encode() == stored


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (spoil("surprise", value=1), "surprise: Extra inputs"),
        (spoil("facts", "surprise", value=1), "facts.corpus.surprise: Extra inputs"),
        (spoil("files", 0, "mode", value=1), "files.0.mode: Extra inputs"),
        (spoil("component", value=...), "component: Field required"),
        (spoil("schema_version", value=2), "schema_version: Input should be 1"),
        (spoil("facts", "kind", value="weights"), "facts: Input tag 'weights'"),
        (spoil("facts", "kind", value="tokens"), "facts.tokens"),
        (spoil("facts", "format", value="csv"), "facts.corpus.format"),
        (spoil("files", 0, "bytes", value="3"), "files.0.bytes: Input should be a valid integer"),
        (spoil("files", 0, "bytes", value=3.0), "files.0.bytes: Input should be a valid integer"),
        (spoil("files", 0, "bytes", value=True), "files.0.bytes: Input should be a valid integer"),
        (spoil("files", 0, "bytes", value=-1), "files.0.bytes"),
        (spoil("files", 0, "sha256", value=SHA.upper()), "files.0.sha256"),
        (spoil("files", 0, "sha256", value=SHA[1:]), "files.0.sha256"),
        (spoil("files", 0, "path", value="ü +%.jsonl"), "repeat a path"),
        (spoil("files", 0, "path", value="manifest.json"), "list the manifest itself"),
        (spoil("options", "lr", value=float("nan")), "NaN or infinite"),
        (spoil("options", "deep", value=[{"x": float("inf")}]), "NaN or infinite"),
        (b"", "file: Invalid JSON"),
        (b"[]", "file: Input should be an object"),
        (b"{", "file: Invalid JSON"),
        (b"\xff\xfe", "file: Invalid JSON"),
        (make().encode()[:-40], "file: Invalid JSON"),
    ],
)
def test_anything_else_is_refused_in_one_line(data: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=r"^s3://b/p/manifest\.json: not a crosstrain manifest of schema 1") as refused:
        decode(data, "s3://b/p/manifest.json")
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../../up", "a/./b", "a//b", "a/", "..", "..\\up", "a\0b", "c:\\x"]
)
def test_paths_out_of_the_prefix_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a relative key"):
        File(path=path, bytes=1, sha256=SHA)
    with pytest.raises(ValueError, match="not a relative key"):
        decode(spoil("files", 0, "path", value=path), "here")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_gets_into_no_manifest(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        CheckpointFacts(step=1, run_key=SHA, train_loss=value)
    with pytest.raises(ValueError, match="NaN or infinite"):
        make(options={"rates": [value]})


def test_a_manifest_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().component = "other"  # type: ignore[misc]


def test_files_are_found_by_path() -> None:
    assert make().file("a/b.jsonl").bytes == 3
    with pytest.raises(FileNotFoundError, match="'a/c' is not in the corpus manifest of import_data"):
        make().file("a/c")


def test_finite_keeps_numbers() -> None:
    assert finite({"a": 1, "b": float("nan"), "c": float("inf"), "d": 0.5}) == {"a": 1.0, "d": 0.5}


leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
tree = st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(options=st.dictionaries(st.text(), tree, max_size=5))
def test_any_json_options_come_back(options: dict[str, Any]) -> None:
    manifest = make(options=options)
    again = decode(manifest.encode(), "here")
    assert again.options == options
    assert Manifest(**{name: getattr(again, name) for name in Manifest.model_fields}).encode() == manifest.encode()
