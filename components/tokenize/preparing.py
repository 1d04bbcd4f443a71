"""The tokenizer of a run as a local folder: taken from an artifact or a prefix, or trained on the corpus.

A trained one is a byte-level BPE with GPT-2's word split: any text comes back from its ids unchanged. Its
special tokens are <|endoftext|> (EOS, id 0) and <|pad|> (id 1); it wants no BOS.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.tokenizer import FILES, SETTINGS_FILE, TOKENIZER_FILE, read_settings, token_text
from crosstrain.components.tokenize.config import TRAINED_EOS, Config
from crosstrain.components.tokenize.encoding import normalize
from crosstrain.components.tokenize.reading import Reader, Unit
from crosstrain.components.tokenize.spooling import LongText
from crosstrain.components.tokenize.tally import Tally

log = logging.getLogger(__name__)

PAD = "<|pad|>"

_CHUNK = 1 << 16
"""Characters of a document given to the trainer at once: a longer word than this is no word."""

_PROBE_DOCUMENTS, _PROBE_CHARACTERS = 64, 512

_CLASS = "PreTrainedTokenizerFast"
"""What AutoTokenizer makes of a folder that says no more, in transformers 4 and 5."""


def prepare_tokenizer(config: Config, corpus: Artifact, units: list[Unit], folder: Path) -> None:
    """Fill `folder` with the tokenizer's files.

    Raises:
        FileNotFoundError: what was named holds no tokenizer.json.
        ValueError: the artifact is of a kind without tokenizer, or the corpus has no text to train on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if config.tokenizer:
        _copy_from_artifact(Artifact.open(config.tokenizer), folder)
    elif config.tokenizer_uri:
        _copy_from_prefix(config.tokenizer_uri, folder)
    else:
        train(config, corpus, units, folder)
    settings = read_settings(folder)
    if not (folder / SETTINGS_FILE).is_file() or token_text(settings.get("eos_token")) != config.eos_token != "":
        settings.setdefault("tokenizer_class", _CLASS)
        settings.setdefault("clean_up_tokenization_spaces", False)
        if config.eos_token:
            settings["eos_token"] = config.eos_token
        _write_settings(folder, settings)


def _copy_from_artifact(artifact: Artifact, folder: Path) -> None:
    if artifact.manifest.kind not in ("tokens", "shards", "model", "plan"):
        raise ValueError(
            f"{artifact.uri}: a {artifact.manifest.kind} artifact has no tokenizer; give tokens, shards or a model"
        )
    prefix = "" if artifact.manifest.kind == "model" else "tokenizer/"
    listed = {file.path for file in artifact.manifest.files}
    if prefix + TOKENIZER_FILE not in listed:
        raise FileNotFoundError(f"{artifact.uri}: this {artifact.manifest.kind} artifact holds no {TOKENIZER_FILE}")
    for name in FILES:
        if prefix + name in listed:
            shutil.copyfile(artifact.fetch(prefix + name), folder / name)


def _copy_from_prefix(uri: str, folder: Path) -> None:
    if uri.endswith(".json"):
        parent, slash, name = uri.rpartition("/")
        open_store(parent or slash or ".").download(name, folder / TOKENIZER_FILE, hashed=False)
        return
    store = open_store(uri)
    for name in FILES:
        if store.exists(name):
            store.download(name, folder / name, hashed=False)
    if not (folder / TOKENIZER_FILE).is_file():
        raise FileNotFoundError(
            f"{uri}: no {TOKENIZER_FILE} here; save it with transformers: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )


def train(config: Config, corpus: Artifact, units: list[Unit], folder: Path) -> None:
    """Train a byte-level BPE of `config.vocab_size` ids; the same text gives the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[TRAINED_EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(config, corpus, units), trainer)
    made = tokenizer.get_vocab_size()
    log.info("trained a byte-level BPE of %d ids", made)
    if made < config.vocab_size:
        log.warning("the corpus has no more pairs to merge: %d ids instead of %d", made, config.vocab_size)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    _write_settings(
        folder,
        {"tokenizer_class": _CLASS, "eos_token": TRAINED_EOS, "pad_token": PAD, "clean_up_tokenization_spaces": False},
    )


def training_texts(config: Config, corpus: Artifact, units: list[Unit]) -> Iterator[str]:
    """Up to `training_bytes` of text, the same share from the start of each unit, in pieces a trainer can hold."""
    share = max(1, config.training_bytes // max(1, len(units)))
    for unit in units:
        left = share
        for text in _documents(config, corpus, unit):
            text = _start(text, left)
            for begin in range(0, len(text), _CHUNK):
                yield text[begin : begin + _CHUNK]
            left -= len(text.encode())
            if left <= 0:
                break


def probe_texts(config: Config, corpus: Artifact, units: list[Unit]) -> Iterator[str]:
    """The starts of the first documents, for the encoders to be compared on."""
    for unit in units[:1]:
        for text in islice(_documents(config, corpus, unit), _PROBE_DOCUMENTS):
            yield _start(text, _PROBE_CHARACTERS)


def _start(text: str | LongText, characters: int) -> str:
    return text.head(characters) if isinstance(text, LongText) else normalize(text)[:characters]


def _documents(config: Config, corpus: Artifact, unit: Unit) -> Iterator[str | LongText]:
    return Reader(corpus, config).documents(unit, Tally(config.on_invalid, quarantine=None))


def _write_settings(folder: Path, settings: dict[str, object]) -> None:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
