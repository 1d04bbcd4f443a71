"""Shards hold every token once, split by text alone, in an order that seed and data alone decide."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.data import ShardDataset
from crosstrain.components.core.manifest import File, Split, TokenizerFacts, TokensFacts
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.tokens import Pair, PairWriter
from crosstrain.components.core.unit_records import UnitRecords
from crosstrain.components.shard import packing
from crosstrain.components.tokenize.encoding import hash_text

EOS = 1
TOKENIZER = TokenizerFacts(sha256="0" * 64, vocab_size=70_000, bos_id=None, eos_id=EOS)


def make_tokens(
    folder: Path | str, documents: list[list[int]], part_documents: int = 7, dtype: str = "uint16"
) -> Artifact:
    """A tokens artifact of these documents; a document's text, for its hash, is its ids as text."""
    stems = []
    with ArtifactWriter(str(folder)) as out:
        for begin in range(0, len(documents), part_documents):
            some = documents[begin : begin + part_documents]
            stem = f"part-{begin // part_documents:05d}"
            with PairWriter(out.staging / stem, np.dtype(dtype)) as writer:
                for ids in some:
                    writer.write(np.array(ids), np.array([len(ids)]))
            np.array([hash_text(str(ids))[0] for ids in some], "<u8").tofile(out.staging / f"{stem}.hash")
            for suffix in (".bin", ".idx", ".hash"):
                out.add(out.staging / (stem + suffix), stem + suffix)
            stems.append(stem)
        with out.create("tokenizer/tokenizer.json") as path:
            path.write_text("{}")
        facts = TokensFacts(
            tokenizer=TOKENIZER, dtype=dtype, parts=tuple(stems), documents=len(documents),  # type: ignore[arg-type]
            tokens=sum(map(len, documents)), text_bytes=1, read=len(documents), empty=0, null=0, quarantined=0,
            duplicates=0, engine="none",
        )  # fmt: skip
        return out.commit("tokenize", facts, {}, {})


def shard(tokens: Artifact, output: Path, **options: Any) -> Artifact:
    values = {"tokens": tokens.uri, "output": str(output), "sequence_length": 8, "workers": 1, **options}
    return execute("shard", load_config("shard").decode(values)).artifact


def documents_of(artifact: Artifact, split: Split) -> list[list[int]]:
    """Whole documents of a split, pieces in different shards put together."""
    folder = artifact.fetch_all()
    found: list[list[int]] = []
    for stem, continues in zip(split.shards, split.continues, strict=True):
        pair = Pair(folder / stem)
        pieces = [pair[i].tolist() for i in range(len(pair))]
        if continues:
            found[-1] += pieces.pop(0)
        found += pieces
    return found


def some_documents(number: int, start: int = 0) -> list[list[int]]:
    return [[100 + i, *range(2, 2 + i % 13), EOS] for i in range(start, start + number)]


document_lists = st.lists(
    st.lists(st.integers(2, 60_000), max_size=30).map(lambda ids: [*ids, EOS]), min_size=1, max_size=40
).filter(lambda documents: sum(map(len, documents)) >= 2)


@given(
    documents=document_lists,
    part=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    fraction=st.floats(0, 0.9),
    shard_tokens=st.integers(1, 200),
    length=st.integers(2, 40),
)
@settings(max_examples=80, deadline=None)
def test_no_token_is_lost_whatever_the_split_seed_and_sizes(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], part: int, seed: int, fraction: float,
    shard_tokens: int, length: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("shard")
    tokens = make_tokens(folder / "tokens", documents, part)
    options: dict[str, Any] = {
        "seed": seed, "validation_fraction": fraction, "shard_tokens": shard_tokens, "sequence_length": length,
    }  # fmt: skip
    try:
        artifact = shard(tokens, folder / "shards", **options)
    except ValueError as error:
        assert any(text in str(error) for text in ("split would be empty", "fewer than one sequence"))
        return
    facts = artifact.facts
    train, validation = documents_of(artifact, facts.train), documents_of(artifact, facts.validation)
    assert sorted(train + validation) == sorted(documents)
    assert not {str(ids) for ids in train} & {str(ids) for ids in validation}
    for name, split, found in (("train", facts.train, train), ("validation", facts.validation, validation)):
        assert split.documents == len(found)
        assert split.tokens == sum(split.shard_tokens) == sum(map(len, found))
        assert all(size == shard_tokens for size in split.shard_tokens[:-1])
        data = ShardDataset(artifact, name)  # type: ignore[arg-type]
        stream = np.concatenate([data[i].input_ids for i in range(len(data))]) if len(data) else np.empty(0)
        assert stream[: split.tokens].tolist() == [i for ids in found for i in ids]
        assert (stream[split.tokens :] == EOS).all()


def test_the_split_stays_when_documents_are_added(tmp_path: Path) -> None:
    before, after = some_documents(120), some_documents(40, start=1000) + some_documents(120)
    held_out = []
    for number, documents in enumerate((before, after)):
        artifact = shard(make_tokens(tmp_path / f"t{number}", documents), tmp_path / f"s{number}", seed=number)
        held_out.append({str(ids) for ids in documents_of(artifact, artifact.facts.validation)})
    known = {str(ids) for ids in before}
    assert held_out[1] & known == held_out[0]
    assert held_out[0] < held_out[1]


def test_the_fraction_of_held_out_documents_is_what_was_asked(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(2000), 500)
    facts = shard(tokens, tmp_path / "s", validation_fraction=0.1).facts
    assert 160 < facts.validation.documents < 240


def test_equal_texts_never_part(tmp_path: Path) -> None:
    documents = some_documents(60) * 3
    artifact = shard(make_tokens(tmp_path / "t", documents), tmp_path / "s", validation_fraction=0.3)
    train, validation = (documents_of(artifact, getattr(artifact.facts, name)) for name in ("train", "validation"))
    assert len(train) + len(validation) == 180
    assert not {str(ids) for ids in train} & {str(ids) for ids in validation}


def test_seed_and_data_alone_decide_the_order(tmp_path: Path) -> None:
    documents = some_documents(100)
    whole, parts = make_tokens(tmp_path / "a", documents, 1000), make_tokens(tmp_path / "b", documents, 3)
    orders = {
        name: documents_of(artifact, artifact.facts.train)
        for name, artifact in {
            "whole": shard(whole, tmp_path / "s0"),
            "parts": shard(parts, tmp_path / "s1"),
            "sizes": shard(parts, tmp_path / "s2", shard_tokens=17, sequence_length=5),
            "seed": shard(parts, tmp_path / "s3", seed=1),
        }.items()
    }
    assert orders["whole"] == orders["parts"] == orders["sizes"] != orders["seed"]
    assert sorted(orders["whole"]) == sorted(orders["seed"])
    places = [ids[0] for ids in orders["whole"]]
    assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.3


def test_the_same_work_gives_the_same_bytes(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(50))
    assert shard(tokens, tmp_path / "a").manifest == shard(tokens, tmp_path / "b").manifest


def test_a_document_longer_than_shards_goes_on_through_them(tmp_path: Path) -> None:
    documents = [[*range(2, 100), EOS], [5, EOS]]
    artifact = shard(make_tokens(tmp_path / "t", documents), tmp_path / "s", validation_fraction=0, shard_tokens=20)
    split = artifact.facts.train
    assert split.shard_tokens == (20, 20, 20, 20, 20, 1)
    assert sum(split.continues) >= 4
    assert sorted(documents_of(artifact, split)) == sorted(documents)
    data = ShardDataset(artifact, "train")
    starts = [int((sample.position_ids == 0).sum()) for sample in (data[i] for i in range(len(data)))]
    assert sum(starts) <= len(data) + 2


def test_what_is_looked_up_at_once_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(100))
    expected = shard(tokens, tmp_path / "a", shard_tokens=50).manifest
    monkeypatch.setattr(packing, "_DOCUMENTS", 3)
    monkeypatch.setattr(packing, "_IDS", 11)
    assert shard(tokens, tmp_path / "b", shard_tokens=50).manifest == expected


def test_four_byte_ids_pass_through(tmp_path: Path) -> None:
    documents = [[69_999, 2, EOS]] * 10
    artifact = shard(make_tokens(tmp_path / "t", documents, dtype="int32"), tmp_path / "s", validation_fraction=0)
    assert artifact.facts.dtype == "int32"
    assert documents_of(artifact, artifact.facts.train) == documents


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(30))
    artifact = shard(tokens, tmp_path / "s")
    assert artifact.facts.tokenizer == TOKENIZER
    assert artifact.manifest.file("tokenizer/tokenizer.json") == tokens.manifest.file("tokenizer/tokenizer.json")


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "an empty corpus"),
        ([[5, EOS]], {"validation_fraction": 0}, "whole corpus has 2 tokens, fewer than one sequence of 8"),
        (
            some_documents(3),
            {"validation_fraction": 1e-9},
            r"validation split would be empty: none of 3 .* above 0\.\d+",
        ),
        (some_documents(3), {"validation_fraction": 0.999999}, r"train split would be empty: all 3 .* at most 0\.\d+"),
        (some_documents(20), {"validation_fraction": 0.5, "sequence_length": 120}, "train split has .* fewer than one"),
    ],
)
def test_what_gives_no_training_data_is_refused(
    tmp_path: Path, documents: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shard(make_tokens(tmp_path / "t", documents), tmp_path / "s", **options)
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_the_fraction_that_an_error_advises_works(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(9))
    with pytest.raises(ValueError, match="would be empty") as caught:
        shard(tokens, tmp_path / "s", validation_fraction=1e-6)
    advised = float(str(caught.value).split("above ")[1].split()[0])
    assert shard(tokens, tmp_path / "s", validation_fraction=advised + 0.001).facts.validation.documents == 1


def test_options_out_of_range_and_other_artifacts_are_refused(tmp_path: Path) -> None:
    decode: Callable[..., Any] = load_config("shard").decode
    for option in ({"validation_fraction": 1.0}, {"sequence_length": 1}, {"shard_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(option))):
            decode({"tokens": "t", "output": "o", **option})
    tokens = make_tokens(tmp_path / "t", some_documents(30))
    shards = shard(tokens, tmp_path / "s")
    with pytest.raises(ValueError, match="this is a shards artifact, and a tokens artifact is wanted"):
        shard(shards, tmp_path / "again")


def test_a_damaged_part_is_an_error(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(30))
    path = tmp_path / "t" / "part-00001.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"part-00001\.bin.*damaged"):
        shard(tokens, tmp_path / "s")


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(60))
    alone = shard(tokens, tmp_path / "one", shard_tokens=100, workers=1).manifest
    assert len(alone.facts.train.shards) > 3
    assert shard(tokens, tmp_path / "two", shard_tokens=100, workers=2).manifest == alone


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_killed_run_finished_is_not_made_again(
    tmp_path: Path, store_uri: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(60))
    expected = shard(tokens, tmp_path / "whole", shard_tokens=100, workers=1).manifest
    options = {"tokens": tokens.uri, "output": store_uri, "sequence_length": 8, "shard_tokens": 100}
    save = UnitRecords.save

    def die_after_three(self: UnitRecords, name: str, note: Any, files: list[File]) -> None:
        if len(list(self._out.store.list("units"))) == 3:
            raise KeyboardInterrupt
        save(self, name, note, files)

    with monkeypatch.context() as patch:
        patch.setattr(UnitRecords, "save", die_after_three)
        with pytest.raises(KeyboardInterrupt):
            execute("shard", load_config("shard").decode({**options, "workers": 1}))
    store = open_store(store_uri)
    finished = {entry.key.removeprefix("units/").removesuffix(".json") for entry in store.list("units")}
    before = {entry.key: entry for entry in store.list() if entry.key.partition(".")[0] in finished}
    assert len(finished) == 3
    assert not store.exists("manifest.json")
    again = execute("shard", load_config("shard").decode({**options, "workers": workers})).artifact
    assert again.manifest == expected
    assert {key: store.stat(key) for key in before} == before
    assert list(store.list("units")) == []


def test_unfinished_shards_of_other_work_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = make_tokens(tmp_path / "t", some_documents(60))
    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            shard(tokens, tmp_path / "s", shard_tokens=100, workers=1)
    assert len(list((tmp_path / "s").glob("train-*.bin"))) > 3
    again = shard(tokens, tmp_path / "s", shard_tokens=400, workers=1)
    assert again.manifest == shard(tokens, tmp_path / "new", shard_tokens=400, workers=1).manifest
    assert {path.name for path in (tmp_path / "s").glob("*.bin")} == {
        f"{stem}.bin" for split in (again.facts.train, again.facts.validation) for stem in split.shards
    }


def test_object_storage_gives_the_same_shards(tmp_path: Path, s3_uri: str) -> None:
    documents = some_documents(60)
    make_tokens(tmp_path / "t", documents)
    config = {"sequence_length": 8, "shard_tokens": 100}
    local = shard(Artifact.open(str(tmp_path / "t")), tmp_path / "s", **config)
    remote_tokens = make_tokens(f"{s3_uri}/t", documents)
    values = {"tokens": remote_tokens.uri, "output": f"{s3_uri}/s", **config}
    remote = execute("shard", load_config("shard").decode(values)).artifact
    assert remote.manifest == local.manifest
    here, there = ShardDataset(local, "train"), ShardDataset(Artifact.open(f"{s3_uri}/s"), "train")
    assert all(np.array_equal(here[i].input_ids, there[i].input_ids) for i in range(len(here)))
