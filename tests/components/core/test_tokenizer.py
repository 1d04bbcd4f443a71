"""Tokenizers: BOS and EOS rules, special-token text, and the fast encoder that has to prove itself."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastokens
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from crosstrain.components.core.tokenizer import load_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 9,
    "def f(x):\n    return x + 1234\n" * 9,
    "Größe, été, 日本語 " * 9,
]
SPECIAL = ["<|begin|>", "<|end|>"]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a byte-level BPE folder; `bos`: its post-processor puts <|begin|> first, as Llama 3's does."""

    def make(settings: dict[str, Any] | None, bos: bool = False, vocab_size: int = 400, truncation: int = 0) -> Path:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
        byte_level = processors.ByteLevel(trim_offsets=False)
        template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
        tokenizer.post_processor = processors.Sequence([byte_level, template]) if bos else byte_level
        if truncation:
            tokenizer.enable_truncation(truncation)
            tokenizer.enable_padding(length=truncation)
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(folder / "tokenizer.json"))
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.mark.parametrize(
    ("settings", "template", "bos"),
    [
        ({"eos_token": "<|end|>"}, True, 0),
        ({"eos_token": "<|end|>"}, False, None),
        ({"eos_token": "<|end|>", "bos_token": "<|begin|>"}, False, None),
        ({"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "add_bos_token": True}, False, 0),
        ({"eos_token": "<|end|>", "bos_token": "<|begin|>", "add_bos_token": False}, True, None),
    ],
)
def test_bos_is_what_the_tokenizer_wants(
    save: Callable[..., Path], settings: dict[str, Any], template: bool, bos: int | None
) -> None:
    tokenizer = load_tokenizer(save(settings, bos=template))
    assert tokenizer.bos_id == bos
    assert tokenizer.eos_id == 1
    assert 0 not in tokenizer.encode_batch(["hello"])[0]


def test_a_template_that_puts_more_than_one_id_first_is_refused(save: Callable[..., Path]) -> None:
    folder = save({"eos_token": "<|end|>"}, bos=True)
    text = (folder / "tokenizer.json").read_text()
    content = json.loads(text)
    template = content["post_processor"]["processors"][1]
    template["single"] = [template["single"][0], *template["single"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="at most one id before a text"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eos_token": "</s>"}, r"eos_token '</s>' is not in the vocabulary of 330 ids; .*<\|begin\|>, <\|end\|>"),
        ({}, r"names no eos_token; .*<\|begin\|>, <\|end\|>"),
        (None, "names no eos_token"),
        ({"eos_token": "<|end|>", "bos_token": "<s>", "add_bos_token": True}, "bos_token '<s>' is not in"),
    ],
)
def test_a_missing_token_is_refused(save: Callable[..., Path], settings: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(save(settings))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_special_token_text_stays_text_unless_asked(save: Callable[..., Path], engine: Any) -> None:
    tokenizer = load_tokenizer(save({"eos_token": "<|end|>"}), engine=engine)
    plain, parsed = (tokenizer.encode_batch(["a<|end|>"], parse_special=parse)[0].tolist() for parse in (False, True))
    assert 1 not in plain
    assert parsed[-1] == 1
    assert tokenizer.decode(plain) == tokenizer.decode(parsed) == "a<|end|>"


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_truncation_and_padding_of_the_file_do_not_apply(save: Callable[..., Path], engine: Any) -> None:
    tokenizer = load_tokenizer(save({"eos_token": "<|end|>"}, truncation=4), engine=engine)
    short, long = tokenizer.encode_batch(["a", "many words " * 20])
    assert len(short) == 1
    assert tokenizer.decode(long) == "many words " * 20


def test_no_texts_no_ids(save: Callable[..., Path]) -> None:
    for engine in ("fastokens", "tokenizers"):
        tokenizer = load_tokenizer(save({"eos_token": "<|end|>"}), engine=engine)  # type: ignore[arg-type]
        assert tokenizer.encode_batch([]) == []
        assert [ids.tolist() for ids in tokenizer.encode_batch(["", ""])] == [[], []]


@pytest.fixture(scope="module")
def both(save: Callable[..., Path]) -> tuple[Any, Any]:
    folder = save({"eos_token": "<|end|>"})
    return load_tokenizer(folder, engine="fastokens"), load_tokenizer(folder, engine="tokenizers")


@given(texts=st.lists(st.text(max_size=60) | st.text(alphabet="aé 1\n\t<|>endbgi", max_size=60), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_its_ids_and_both_encoders_agree(both: tuple[Any, Any], texts: list[str]) -> None:
    fast, reference = both
    ids, expected = fast.encode_batch(texts), reference.encode_batch(texts)
    assert [i.tolist() for i in ids] == [i.tolist() for i in expected]
    assert [fast.decode(i) for i in ids] == texts


def test_engine_names_the_encoder_and_its_version(both: tuple[Any, Any]) -> None:
    fast, reference = both
    assert fast.engine.startswith("fastokens 0.")
    assert reference.engine.startswith("tokenizers 0.")
    assert fast.facts() == reference.facts()


def test_an_encoder_whose_ids_differ_is_not_used(save: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """Fastokens 0.3.5 keeps the id of an added token beyond the vocabulary, tokenizers gives it the next free one."""
    folder = save({"eos_token": "<|end|>"})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "<|late|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(folder)
    assert tokenizer.engine.startswith("tokenizers")
    assert "its ids differ" in caplog.text
    with pytest.raises(ValueError, match="fastokens cannot be used: its ids differ"):
        load_tokenizer(folder, engine="fastokens")


def test_the_probe_is_checked_too(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that is wrong on one word of the corpus alone is found out by the corpus' own text."""
    folder = save({"eos_token": "<|end|>"})
    real = fastokens.Tokenizer.from_file(str(folder / "tokenizer.json"))

    class AlmostRight:
        @staticmethod
        def from_file(path: str) -> Any:
            return AlmostRight()

        def no_truncation(self) -> None: ...

        def no_padding(self) -> None: ...

        def encode_batch_flat(self, texts: list[str], split_special_tokens: bool) -> Any:
            wrong = [text.replace("xylophone", "x") for text in texts]
            return real.encode_batch_flat(wrong, split_special_tokens=split_special_tokens)

    monkeypatch.setattr(fastokens, "Tokenizer", AlmostRight)
    assert load_tokenizer(folder).engine.startswith("fastokens")
    assert load_tokenizer(folder, probe=["a xylophone"]).engine.startswith("tokenizers")


def test_vocab_size_counts_up_to_the_largest_id(save: Callable[..., Path]) -> None:
    folder = save({"eos_token": "<|end|>"})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["Z"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 501
    assert tokenizer.encode_batch(["Z"])[0].tolist() == [500]
