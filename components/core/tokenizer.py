"""Tokenizers as this project uses them: ids of plain text, fast, and checked against the reference.

A tokenizer is a Hugging Face folder with `tokenizer.json`. Text is encoded by fastokens, tens of times faster
than the `tokenizers` library, once both have given identical ids for a probe; otherwise by `tokenizers`, saying
so. No special token is ever added here: who writes documents puts one BOS (where the tokenizer wants one)
and one EOS around them. Left out on purpose: chat templates and padding.
"""

import hashlib
import importlib
import json
import logging
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from crosstrain.components.core.manifest import TokenizerFacts

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
FILES = (TOKENIZER_FILE, SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""What makes up a tokenizer folder; all but the first are optional."""

Engine = Literal["auto", "fastokens", "tokenizers"]

Flat = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Ids of many texts in one array, and how many of them are each text's."""


class Tokenizer:
    """A loaded tokenizer; make it with `load_tokenizer`."""

    def __init__(self, folder: Path, name: str = "") -> None:
        path = folder / TOKENIZER_FILE
        self.folder = folder
        self._name = name or str(folder)
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        """SHA-256 of tokenizer.json."""
        self.reference = _parse(path, self._name)
        added = self.reference.get_added_tokens_decoder()
        self.added: list[str] = [added[number].content for number in sorted(added)]
        """Texts of the added tokens, by id."""
        self._special = [token.content for _, token in sorted(added.items()) if token.special]
        self.vocab_size = max(self.reference.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Largest id plus one."""
        settings = read_settings(folder)
        self.eos_id = self._named(settings, "eos_token")
        """Id put after each document."""
        self.bos_id = self._wanted_bos(settings)
        """Id put before each document, None where the tokenizer wants none."""
        self._fast: Any = None

    @property
    def encoder(self) -> Literal["fastokens", "tokenizers"]:
        """The library that encodes."""
        return "tokenizers" if self._fast is None else "fastokens"

    @property
    def engine(self) -> str:
        """The library that encodes and its version."""
        return f"{self.encoder} {version(self.encoder)}"

    def facts(self) -> TokenizerFacts:
        """What a manifest says of this tokenizer."""
        return TokenizerFacts(sha256=self.sha256, vocab_size=self.vocab_size, bos_id=self.bos_id, eos_id=self.eos_id)

    def encode_flat(self, texts: Sequence[str], parse_special: bool = False) -> Flat:
        """Ids of many texts in one array, none added.

        Args:
            texts: Valid Unicode, so without lone surrogates.
            parse_special: Turn the text of a special token into its id; otherwise it stays text.

        Returns:
            ids [sum of lengths] and lengths [texts].
        """
        if self._fast is not None:
            ids, offsets = self._fast.encode_batch_flat(list(texts), split_special_tokens=not parse_special)
            return np.frombuffer(ids, np.uint32), _lengths(np.frombuffer(offsets, np.int64))
        self.reference.encode_special_tokens = not parse_special
        found = [encoding.ids for encoding in self.reference.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in found], np.int64)
        return np.fromiter(chain.from_iterable(found), np.uint32, count=int(lengths.sum())), lengths

    def encode_batch(self, texts: Sequence[str], parse_special: bool = False) -> list[NDArray[np.int64]]:
        """Ids of each text, none added; see `encode_flat`."""
        ids, lengths = self.encode_flat(texts, parse_special)
        return np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1]) if len(texts) else []

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        """The text of ids, special tokens included."""
        return str(self.reference.decode([int(i) for i in ids], skip_special_tokens=False))

    def use_fastokens(self, fast: Any, probe: Iterable[str] | None) -> str:
        """Switch to fastokens if it gives the reference's ids for every probe text; else the reason why not.

        Texts with added tokens in them are tried with special tokens parsed as well.
        Without a probe (None) nothing is tried.
        """
        checks: list[tuple[bool, list[str]]] = []
        if probe is not None:
            difficult = difficult_texts(self.added)
            marked = [text for text in difficult if any(token in text for token in self.added)]
            checks = [(False, [*difficult, *probe]), (True, marked)]
        for parse_special, texts in checks:
            self._fast = None
            expected = self.encode_flat(texts, parse_special)
            self._fast = fast
            got = self.encode_flat(texts, parse_special)
            if not (np.array_equal(expected[0], got[0]) and np.array_equal(expected[1], got[1])):
                self._fast = None
                return f"its ids differ from those of tokenizers for {texts[_first_difference(expected, got)][:40]!r}"
        self._fast = fast
        return ""

    def _named(self, settings: dict[str, Any], role: str) -> int:
        """The id of the token that the settings name for a role."""
        token = token_text(settings.get(role))
        if not token:
            raise ValueError(
                f"{self._name}: the tokenizer names no {role}; set {role} to one of its special tokens: "
                f"{self._suggest()}"
            )
        found = self.reference.token_to_id(token)
        if found is None:
            raise ValueError(
                f"{self._name}: {role} {token!r} is not in the vocabulary of {self.vocab_size:,} ids; "
                f"set {role} to one of its special tokens: {self._suggest()}"
            )
        return int(found)

    def _suggest(self) -> str:
        return ", ".join(self._special[:8]) or "it has none, add one first"

    def _wanted_bos(self, settings: dict[str, Any]) -> int | None:
        """The id the tokenizer puts first: as `add_bos_token` says, else as its post-processor does."""
        explicit = settings.get("add_bos_token")
        if explicit is not None:
            return self._named(settings, "bos_token") if explicit else None
        with_special = self.reference.encode("a").ids
        plain = self.reference.encode("a", add_special_tokens=False).ids
        places = [i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain]
        if not places or places[0] > 1:
            raise ValueError(
                f"{self._name}: the post-processor makes {with_special} of {plain}; at most one id before a text is "
                "supported: set add_bos_token in tokenizer_config.json"
            )
        return int(with_special[0]) if places[0] else None


def load_tokenizer(
    folder: Path, probe: Iterable[str] = (), engine: Engine = "auto", proven: bool = False, name: str = ""
) -> Tokenizer:
    """Load a tokenizer folder and choose its encoder.

    Args:
        folder: Holds tokenizer.json and, as a rule, tokenizer_config.json.
        probe: Texts like those to be encoded; built-in difficult ones are always checked as well.
        engine: `tokenizers` skips the check; `fastokens` makes a failed check an error.
        proven: The check was passed by another process of this machine, and is not made again.
        name: What errors call the tokenizer, where the folder is a copy.

    Raises:
        FileNotFoundError: no tokenizer.json there.
        ValueError: the file does not load, EOS is missing from the vocabulary, or fastokens was demanded and differs.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: no {TOKENIZER_FILE} here; save it with transformers: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    if engine == "tokenizers":
        return Tokenizer(folder, name)
    with ThreadPoolExecutor(1) as thread:  # both libraries load without holding the interpreter
        loading = thread.submit(_load_fastokens, folder / TOKENIZER_FILE)
        tokenizer = Tokenizer(folder, name)
        texts = None if proven else list(probe)
        reason = _use(tokenizer, loading, texts)
    if reason and engine == "fastokens":
        raise ValueError(f"{name or folder}: fastokens cannot be used: {reason}")
    if reason:
        log.warning("encoding with tokenizers, which is slower than fastokens: %s", reason)
    return tokenizer


def _load_fastokens(path: Path) -> Any:
    fast: Any = importlib.import_module("fastokens").Tokenizer.from_file(str(path))
    fast.no_truncation()
    fast.no_padding()
    return fast


def _use(tokenizer: Tokenizer, loading: Future[Any], texts: list[str] | None) -> str:
    try:
        fast = loading.result()
    except (ImportError, ValueError, NotImplementedError, OSError) as error:
        return f"it does not load: {error}"
    return tokenizer.use_fastokens(fast, texts)


def read_settings(folder: Path) -> dict[str, Any]:
    """The tokenizer's settings: tokenizer_config.json over special_tokens_map.json; {} when there is neither."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", SETTINGS_FILE):
        if (folder / name).is_file():
            try:
                settings |= json.loads((folder / name).read_text(encoding="utf-8"))
            except (json.JSONDecodeError, TypeError) as error:
                raise ValueError(f"{folder / name}: not a JSON object ({error})") from None
    return settings


def token_text(value: Any) -> str:
    """A token as settings hold it: plain, or an object with `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _lengths(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    return offsets[1:] - offsets[:-1]


def _first_difference(expected: Flat, got: Flat) -> int:
    """The first text whose ids differ."""
    ids, lengths = expected
    other_ids, other_lengths = got
    begin = 0
    for place, (length, other) in enumerate(zip(lengths, other_lengths, strict=True)):
        if length != other or not np.array_equal(ids[begin : begin + length], other_ids[begin : begin + length]):
            return place
        begin += length
    raise AssertionError("equal")


def _parse(path: Path, name: str) -> tokenizers.Tokenizer:
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ValueError(f"{name}: not a tokenizer that the tokenizers library reads ({error})") from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def difficult_texts(added: Sequence[str]) -> list[str]:
    """Texts on which encoders have differed: spaces, marks, scripts, digits, and added tokens as text."""
    mixer = random.Random(0)
    pieces = [*_ALPHABET, *added[:32]]
    mixed = ["".join(mixer.choices(pieces, k=mixer.randint(1, 40))) for _ in range(400)]
    around = [f"{left}{token}{right}" for token in added[:32] for left, right in (("", ""), ("a ", " b"), ("<", ">"))]
    return ["", *_ALPHABET, *mixed, *around, "a" * 3000, " " * 1000, "ab " * 500, "é" * 700, "\n" * 300]


_ALPHABET = (
    *" \t\n\r\x0b\x0c\x00\x1f\x7f\x85\xa0\xad",
    *"\u1680\u180e\u2003\u200b\u200c\u200d\u2028\u2029\u202e\u3000\ufeff\ufffd\ufffe",
    *"aA0 7_-#/\\ǅßſİıΩя²½Ⅷ①٣५ﬁÅ\u212b가각\u0301\u0e33▁Ġ",
    *"\u0378\ue000\u1c89\u0897\U0010ffff\U00010d40\U000e0041𝒳𐍈\U0001f600",
    *("\r\n", "\n\n", "  ", "   \n  ", " a", "the", " The", " Я", "'s", "'S", "'ll", "'RE", "’s", "don't"),
    *("--", "...", "…", "?!", "«", "(", ")]", "{}", "//", "12", "123", "1234", "3.14", "1e-5", "0x1F"),
    *("e\u0301", "a\u0308\u0323", "\u1100\u1161", "日本", "語。", "ภาษา", "नमस्ते", "العربية", "עברית"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "❤\ufe0f"),
    *("def f(x):\n\treturn x", "<|", "|>", "</s>", "[INST]", "##"),
)
