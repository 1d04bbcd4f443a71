"""What becomes of a text: one BOS, one EOS, nothing wrapped, nothing lost, and huge documents in bounded pieces."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, trainers

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.tokenizer import Tokenizer, load_tokenizer
from crosstrain.components.core.tokens import Pair
from crosstrain.components.tokenize import encoding, pieces
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.encoding import hash_text, write_part
from crosstrain.components.tokenize.tally import Counts, Tally

Take = Callable[..., str]
Tokenize = Callable[..., Artifact]
Ids = Callable[[Artifact], list[list[int]]]
Texts = Callable[[Artifact], list[str]]

BOS, EOS = 0, 1

WORDS = [
    "the",
    " quick",
    " brown",
    "fox",
    " ",
    "  ",
    "\n",
    "\r\n",
    ".",
    ", and",
    "123456",
    "é",
    "日本",
    "日本",
    "(",
    "'s",
    "Dog",
]


def jsonl(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def part(folder: Path, tokenizer: Tokenizer, texts: list[str], **options: Any) -> tuple[Pair, Counts]:
    """Encode texts into a part, without files and manifests around it."""
    config = Config(corpus="c", output="o", tokenizer_uri="t", **options)
    tally = Tally("error", None)
    counts = write_part(iter(texts), folder / "part", tokenizer, config, tally, lambda documents, tokens: None)
    return Pair(folder / "part"), counts


def test_empty_documents_are_counted_and_leave_the_boundaries_right(
    take: Take, tokenize: Tokenize, texts_of: Texts
) -> None:
    artifact = tokenize(take({"a.jsonl": jsonl("", "one", " \n\t ", "", "two", "\ufeff")}))
    facts = artifact.facts
    assert texts_of(artifact) == ["one", "two"]
    assert (facts.read, facts.documents, facts.empty) == (6, 2, 4)
    pair = Pair(artifact.fetch_all() / "part-00000")
    assert pair.lengths.sum() == pair.ids.size == facts.tokens
    assert (artifact.fetch_all() / "part-00000.hash").stat().st_size == 8 * 2


def test_a_tokenizer_that_wants_bos_gets_exactly_one(
    take: Take, tokenize: Tokenize, ids_of: Ids, make_tokenizer: Callable[..., Path]
) -> None:
    corpus = take({"a.jsonl": jsonl("hello there", "<|begin|>rendered by a template<|end|>")})
    uri = str(make_tokenizer(bos=True))
    for options in ({}, {"parse_special": True}):
        artifact = tokenize(corpus, tokenizer_uri=uri, **options)
        assert artifact.facts.tokenizer.bos_id == BOS
        for ids in ids_of(artifact):
            assert (ids[0], ids.count(BOS)) == (BOS, 1)
            assert (ids[-1], ids.count(EOS)) == (EOS, 1)
    without = ids_of(tokenize(corpus))
    assert all(BOS not in ids for ids in without)


def test_special_token_text_becomes_an_id_only_when_asked(take: Take, tokenize: Tokenize, ids_of: Ids) -> None:
    corpus = take({"a.jsonl": jsonl("a<|end|>b")})
    assert ids_of(tokenize(corpus))[0].count(EOS) == 1
    assert ids_of(tokenize(corpus, parse_special=True))[0].count(EOS) == 2


def test_eos_can_be_left_out(take: Take, tokenize: Tokenize, ids_of: Ids) -> None:
    corpus = take({"a.jsonl": jsonl("one", "two")})
    with_eos, without = ids_of(tokenize(corpus)), ids_of(tokenize(corpus, append_eos=False))
    assert [[*ids, EOS] for ids in without] == with_eos


def test_eos_outside_the_vocabulary_is_refused(take: Take, tokenize: Tokenize, plain_tokenizer: Path) -> None:
    with pytest.raises(ValueError, match=f"^{plain_tokenizer}: eos_token '</s>' is not in the vocabulary"):
        tokenize(take({"a.jsonl": jsonl("one")}), eos_token="</s>")


def test_eos_is_the_token_that_was_chosen(take: Take, tokenize: Tokenize, ids_of: Ids) -> None:
    from transformers import AutoTokenizer

    artifact = tokenize(take({"a.jsonl": jsonl("one")}), eos_token="<|begin|>")
    assert ids_of(artifact)[0][-1] == artifact.facts.tokenizer.eos_id == BOS
    assert AutoTokenizer.from_pretrained(artifact.fetch_all() / "tokenizer").eos_token == "<|begin|>"


def test_a_vocabulary_over_65536_is_stored_in_four_bytes_and_comes_back(
    take: Take, tokenize: Tokenize, ids_of: Ids, texts_of: Texts, make_tokenizer: Callable[..., Path]
) -> None:
    folder = make_tokenizer(extra=70_000)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["Z"], content["model"]["vocab"]["unused69999"] = (
        content["model"]["vocab"]["unused69999"],
        content["model"]["vocab"]["Z"],
    )
    (folder / "tokenizer.json").write_text(json.dumps(content))
    artifact = tokenize(take({"a.jsonl": jsonl("Z and a")}), tokenizer_uri=str(folder))
    assert artifact.facts.dtype == "int32"
    assert ids_of(artifact)[0][0] > 65_536
    assert texts_of(artifact) == ["Z and a"]


def test_equal_documents_are_kept_once_when_asked(take: Take, tokenize: Tokenize, texts_of: Texts) -> None:
    texts = [f"document {number} " * 30 for number in (0, 1, 0, 2, 2, 2, 3, 1, 0)]
    corpus = take({"a.jsonl": jsonl(*texts), "b.jsonl": jsonl(texts[0], texts[3])})
    assert texts_of(tokenize(corpus)) == [*texts, texts[0], texts[3]]
    for unit_bytes in (1024, 1 << 27):
        artifact = tokenize(corpus, deduplicate=True, unit_bytes=unit_bytes)
        facts, kept = artifact.facts, [texts[0], texts[1], texts[3], texts[6]]
        assert texts_of(artifact) == kept
        assert (facts.read, facts.documents, facts.duplicates) == (11, 4, 7)
        assert facts.text_bytes == sum(map(len, kept))
        assert facts.tokens == sum(Pair(artifact.fetch_all() / stem).ids.size for stem in facts.parts)
        assert sorted(file.path for file in artifact.manifest.files if file.path.startswith("part")) == sorted(
            stem + suffix for stem in facts.parts for suffix in (".bin", ".idx", ".hash")
        )


def test_deduplication_in_many_passes_is_the_same(
    take: Take, tokenize: Tokenize, texts_of: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crosstrain.components.tokenize import deduplicating

    texts = [f"document {number % 17} " for number in range(60)]
    monkeypatch.setattr(deduplicating, "DOCUMENTS_A_PASS", 7)
    assert texts_of(tokenize(take({"a.jsonl": jsonl(*texts)}), deduplicate=True)) == texts[:17]


def test_documents_whose_hashes_collide_are_both_kept(
    take: Take, tokenize: Tokenize, texts_of: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "hash_text", lambda text: (7, len(text)))
    assert texts_of(tokenize(take({"a.jsonl": jsonl("a", "b", "a", "b")}), deduplicate=True)) == ["a", "b"]


def test_hashes_are_of_the_text(tmp_path: Path, plain_tokenizer: Path) -> None:
    part(tmp_path, load_tokenizer(plain_tokenizer), ["one", "two", "one"])
    hashes = np.fromfile(tmp_path / "part.hash", "<u8").tolist()
    assert hashes[0] == hashes[2] != hashes[1]
    assert hashes[0] == int.from_bytes(hashlib.sha256(b"one").digest()[:8], "little")
    assert hash_text("é" * 5) == (hash_text("ééééé")[0], 10)


@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=80).map("".join), max_size=4),
    piece=st.integers(4, 64),
    batch=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_pieces_and_batches_of_any_size_give_the_same_ids(
    tmp_path_factory: pytest.TempPathFactory, plain_tokenizer: Path, texts: list[str], piece: int, batch: int
) -> None:
    tokenizer = load_tokenizer(plain_tokenizer, engine="tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        for module in (pieces, encoding):
            patch.setattr(module, "PIECE", piece)
        patch.setitem(encoding.BATCH, "tokenizers", batch)
        pair, counts = part(tmp_path_factory.mktemp("p"), tokenizer, texts)
    texts = [text.replace("\r\n", "\n") for text in texts if not text.isspace()]
    expected = [[*ids.tolist(), EOS] for ids in tokenizer.encode_batch(texts)]
    assert [pair[i].tolist() for i in range(len(pair))] == expected
    assert counts.documents == len(texts)


def test_long_texts_are_cut(plain_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 100)
    text = "several plain words in a row " * 50
    cuts = pieces.find_cuts(text, load_tokenizer(plain_tokenizer), parse_special=False)
    assert len(cuts) > len(text) // 100
    assert max(np.diff([0, *cuts, len(text)])) <= 100


def test_a_cut_that_would_change_the_ids_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BPE without word split merges across spaces, so that most likely places are no places to cut."""
    model = tokenizers.Tokenizer(models.BPE())
    sentence = "it merges right across the words of a text, now and then. "
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], show_progress=False)
    model.train_from_iterator([sentence * 9], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    monkeypatch.setattr(pieces, "PIECE", 64)
    words = sentence.split()
    text = " ".join(words[number * number % 7 + number % 5] for number in range(600))
    cuts = pieces.find_cuts(text, tokenizer, parse_special=False)
    assert cuts
    parts = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    assert np.array_equal(tokenizer.encode_flat(parts)[0], tokenizer.encode_flat([text])[0])


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_a_million_equal_letters_are_one_document(take: Take, tokenize: Tokenize, texts_of: Texts, engine: str) -> None:
    text = "a" * 1_000_000
    assert texts_of(tokenize(take({"a.jsonl": jsonl(text, "next")}), engine=engine)) == [text, "next"]


def test_text_that_cannot_be_cut_is_refused_or_set_aside(
    take: Take, tokenize: Tokenize, texts_of: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1 << 8)
    monkeypatch.setattr(pieces, "LONGEST", 1 << 10)
    corpus = take({"a.jsonl": jsonl("before", "a" * 3000, "after")})
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: 1,024 characters without a place"):
        tokenize(corpus)
    artifact = tokenize(corpus, on_invalid="quarantine")
    assert texts_of(artifact) == ["before", "after"]
    assert artifact.facts.quarantined == 1


RUN_AND_TELL_PEAK = """
import runpy, sys
sys.argv = ["tokenize", *sys.argv[1:]]
runpy.run_module("crosstrain.components.tokenize", run_name="__main__")
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_bounded_for_a_huge_document(take: Take, tmp_path: Path, plain_tokenizer: Path) -> None:
    """200 MB of text on one line: its bytes and its text are held, its 90 million tokens are not."""
    sentence = "the quick brown fox, jumps over the lazy dog. "
    corpus = take({"a.jsonl": '{"text": "' + sentence * (200_000_000 // len(sentence)) + '"}\n'})
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_TELL_PEAK, "--corpus", corpus, "--output", str(tmp_path / "tokens"),
         "--tokenizer-uri", str(plain_tokenizer), "--engine", "fastokens"],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert int(done.stdout.split("VmHWM:")[1].split()[0]) < 800 << 10
    facts = Artifact.open(str(tmp_path / "tokens")).facts
    assert (facts.documents, facts.text_bytes) == (1, 200_000_000 // len(sentence) * len(sentence))
