"""What a run learns from: shards, or rows encoded with the model's tokenizer, checked against the model.

Left out on purpose: weights; all that is here costs little and comes before they are loaded.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.data import ShardDataset
from crosstrain.components.core.manifest import ModelFacts
from crosstrain.components.core.tokenizer import FILES, load_tokenizer
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.packing import PackedRows
from crosstrain.components.finetune_lora.rows import RowDataset, read_rows
from crosstrain.components.finetune_lora.vocabulary import extend_tokenizer

ROW_LENGTH = 1024
"""Longest row in tokens when the user sets none."""


@dataclass(frozen=True)
class Material:
    """What to train on and, where the data have such a split, what to measure on."""

    train: ShardDataset | RowDataset | PackedRows
    validation: ShardDataset | None = None
    rows: int = 0
    """Rows that are trained on; 0 for shards."""
    dropped: int = 0
    """Rows left out because nothing is to be learned from them."""
    known: int = 0
    """Ids of the model's own tokenizer."""
    vocab_size: int = 0
    """Ids with the new tokens; 0 where there are none."""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the tokenizer with the new tokens, by name; empty where there are none."""


def read_material(base: Artifact, data: Artifact, config: Config) -> Material:
    """Open the data, or read them whole where they are rows.

    Raises:
        ValueError: the data are of another kind or tokenizer, do not fit the model, or a row is wrong.
    """
    if data.manifest.kind == "shards":
        for option, given in (("new_tokens", config.new_tokens), ("packing", config.packing)):
            if given:
                raise ValueError(
                    f"{data.uri}: shards are tokenized and packed already; leave out {option}, or give rows"
                )
        _check_shards(base, data)
        bound = config.cache_bytes
        return Material(ShardDataset(data, "train", bound), ShardDataset(data, "validation", bound))
    if data.manifest.kind != "corpus":
        raise ValueError(f"{data.uri}: this is a {data.manifest.kind} artifact; give shards or a corpus of JSONL rows")
    facts: ModelFacts = base.facts
    if facts.tokenizer_sha256 is None:
        raise ValueError(
            f"{base.uri}: the model has no tokenizer.json, and rows of text need one; import it with the model"
        )
    if config.sequence_length > facts.max_sequence_length:
        raise ValueError(
            f"sequence_length {config.sequence_length} is above the model's maximum of {facts.max_sequence_length} "
            "positions; choose a smaller one"
        )
    return _read_rows(base, data, config)


def _read_rows(base: Artifact, data: Artifact, config: Config) -> Material:
    for file in base.manifest.files:
        if file.path in FILES:
            base.fetch(file.path)
    folder = base.fetch("tokenizer.json").parent
    tokenizer = load_tokenizer(folder)
    known = tokenizer.vocab_size
    _check_vocabulary(known, base)
    length = config.sequence_length or min(ROW_LENGTH, base.facts.max_sequence_length)
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if config.new_tokens:
            files = {
                file.name: file.read_bytes() for file in extend_tokenizer(folder, Path(scratch), config.new_tokens)
            }
            tokenizer = load_tokenizer(Path(scratch))
        rows = read_rows(data, tokenizer, config, length)
    train = PackedRows(rows, length) if config.packing else rows
    size = tokenizer.vocab_size if files else 0
    return Material(train, None, len(rows), rows.dropped, known, size, files)


def _check_shards(base: Artifact, data: Artifact) -> None:
    model, shards = base.facts, data.facts
    if shards.tokenizer.sha256 != model.tokenizer_sha256:
        has = f"{model.tokenizer_sha256[:12]}…" if model.tokenizer_sha256 else "no tokenizer.json"
        raise ValueError(
            f"{data.uri}: made with the tokenizer {shards.tokenizer.sha256[:12]}…, and the model has {has}; tokenize "
            "the text again with tokenizer set to the model"
        )
    _check_vocabulary(shards.tokenizer.vocab_size, base)
    if shards.sequence_length > model.max_sequence_length:
        raise ValueError(
            f"{data.uri}: sequence length {shards.sequence_length} is above the model's maximum of "
            f"{model.max_sequence_length} positions; shard with a smaller sequence_length"
        )


def _check_vocabulary(size: int, base: Artifact) -> None:
    facts: ModelFacts = base.facts
    if size > facts.vocab_size:
        raise ValueError(
            f"{base.uri}: the tokenizer has {size} ids and the model's embedding {facts.vocab_size}; resize the "
            "model's embeddings to its tokenizer first"
        )
