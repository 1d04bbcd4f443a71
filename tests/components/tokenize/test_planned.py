"""A corpus tokenized by plan, partitions and join: the bytes of one step, trained once, and never the wrong ones."""

import json

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.tokenize import preparing

LINES = "".join(
    json.dumps({"text": f"document {i % 50} of words, and more of them " * (i % 5 + 1)}) + "\n" for i in range(90)
)
TRAINED = {"vocab_size": 300, "unit_bytes": 1024}


def step(component, **values):
    return execute(component, load_config(component).decode(values))


@pytest.fixture
def corpus(take):
    return take({"a.jsonl": LINES})


@pytest.fixture
def fan_out(corpus, store_uri):
    """Plan at `store_uri`, do these partitions (None: all, the last first), join; the joined artifact."""

    def run(partitions, given=None, **options):
        plan = step("tokenize_plan", corpus=corpus, output=f"{store_uri}/plan", partitions=partitions, **options)
        count = plan.artifact.facts.partitions
        receipts = [
            step(
                "tokenize_partition",
                corpus=corpus, plan=plan.artifact.uri, partition=i, workers=1, output=f"{store_uri}/receipt-{i}",
            ).artifact.uri
            for i in (reversed(range(count)) if given is None else given)
        ]  # fmt: skip
        return step(
            "tokenize_join",
            corpus=corpus, plan=plan.artifact.uri, partitions=receipts, workers=1, output=f"{store_uri}/tokens",
        ).artifact  # fmt: skip

    return run


@pytest.mark.parametrize(("partitions", "deduplicate"), [(1, False), (3, True), (1000, False)])
def test_any_number_of_partitions_gives_the_tokens_of_one_step(fan_out, corpus, tmp_path, partitions, deduplicate):
    options = {**TRAINED, "deduplicate": deduplicate}
    whole = step("tokenize", corpus=corpus, output=str(tmp_path / "whole"), workers=1, **options).artifact
    joined = fan_out(partitions, **options)
    assert len(whole.facts.parts) > 3 and whole.facts.duplicates == (40 if deduplicate else 0)
    assert joined.manifest.sha256 == whole.manifest.sha256
    for file in whole.manifest.files:
        assert joined.read(file.path) == whole.read(file.path)
    assert Artifact.open(joined.uri, "tokens").manifest == joined.manifest


def test_a_given_tokenizer_is_named_as_by_one_step(fan_out, corpus, tmp_path, tokenize):
    other = tokenize(corpus, eos_token="<|begin|>")
    options = {"tokenizer": other.uri, "unit_bytes": 1024}
    whole = step("tokenize", corpus=corpus, output=str(tmp_path / "whole"), workers=1, **options).artifact
    joined = fan_out(3, **options)
    assert set(joined.manifest.inputs) == {"corpus", "tokenizer"}
    assert joined.manifest.sha256 == whole.manifest.sha256


def test_the_tokenizer_is_trained_once(fan_out, monkeypatch):
    trained, train = [], preparing.train
    monkeypatch.setattr(preparing, "train", lambda *given: (trained.append(1), train(*given)))
    fan_out(3, **TRAINED)
    assert len(trained) == 1


def test_shards_are_made_of_joined_tokens(fan_out, corpus, tmp_path):
    whole = step("tokenize", corpus=corpus, output=str(tmp_path / "whole"), workers=1, **TRAINED).artifact
    made = [
        step("shard", tokens=tokens.uri, sequence_length=32, output=str(tmp_path / name)).artifact.manifest.sha256
        for name, tokens in (("a", whole), ("b", fan_out(3, **TRAINED)))
    ]
    assert made[0] == made[1]


def test_only_what_is_unfinished_is_done_again(fan_out, store_uri, corpus):
    store = open_store(store_uri)
    with pytest.raises(ValueError, match="partition 1 of 3 has not said that it is done"):
        fan_out(3, given=(0, 2), **TRAINED)
    before = {entry.key: entry.etag for entry in store.list() if "part-" in entry.key or "receipt" in entry.key}
    parts = [key for key in before if key.endswith(".bin")]
    joined = fan_out(3, **TRAINED)
    after = {entry.key: entry.etag for entry in store.list()}
    assert len(parts) < len(joined.facts.parts)
    assert {key: after[key] for key in before if "/units/" not in key} == {
        key: etag for key, etag in before.items() if "/units/" not in key
    }
    again = fan_out(3, **TRAINED)
    assert again.manifest == joined.manifest
    last = {entry.key: entry.etag for entry in store.list() if "part-" in entry.key}
    assert last == {key: etag for key, etag in after.items() if "part-" in key and "/units/" not in key}


def test_parts_that_were_lost_are_made_up_for(fan_out, store_uri, corpus, tmp_path):
    joined = fan_out(3, **TRAINED)
    expected = joined.manifest.encode()
    store = open_store(f"{store_uri}/plan/tokens")
    store.delete("manifest.json")
    store.delete(f"{joined.facts.parts[1]}.bin")
    assert fan_out(3, **TRAINED).manifest.encode() == expected
    assert store.exists(f"{joined.facts.parts[1]}.bin")


def test_a_receipt_or_a_plan_of_other_work_is_refused(fan_out, corpus, store_uri, take, tmp_path):
    fan_out(2, **TRAINED)
    plan = step("tokenize_plan", corpus=corpus, output=str(tmp_path / "plan"), partitions=2, vocab_size=301).artifact
    with pytest.raises(ValueError, match="the receipt of another plan"):
        step(
            "tokenize_join",
            corpus=corpus, plan=plan.uri, partitions=[f"{store_uri}/receipt-0"], output=str(tmp_path / "out"),
        )  # fmt: skip
    other = take({"b.jsonl": LINES * 2})
    with pytest.raises(ValueError, match="the plan of another corpus"):
        step("tokenize_partition", corpus=other, plan=plan.uri, partition=0, output=str(tmp_path / "receipt"))
    with pytest.raises(ValueError, match="from 0 to"):
        step("tokenize_partition", corpus=corpus, plan=plan.uri, partition=7, output=str(tmp_path / "receipt"))
