"""A tiny shards artifact: Megatron pairs of a language with structure, written by the real writers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from crosstrain.components.core.artifact import ArtifactWriter, hash_file
from crosstrain.components.core.manifest import ShardsFacts, Split, TokenizerFacts
from crosstrain.components.core.tokens import PairWriter, token_dtype

VOCAB_SIZE, EOS = 96, 1


def write_shards(
    uri: str, documents: int = 60, sequence_length: int = 32, seed: int = 0, lengths: tuple[int, int] = (5, 60)
) -> str:
    """Write a shards artifact of random walks over a small vocabulary; its URI.

    Args:
        uri: Where.
        documents: Documents of the train split; the validation split has a quarter as many.
        sequence_length: Ids a sample.
        seed: Seed of the text.
        lengths: Shortest and longest document, EOS not counted.
    """
    random = np.random.default_rng(seed)
    with ArtifactWriter(uri) as writer:
        splits = {}
        for name, count in (("train", documents), ("validation", max(1, documents // 4))):
            stem = f"{name}-00000"
            with PairWriter(writer.staging / stem, token_dtype(VOCAB_SIZE)) as pair:
                for _ in range(count):
                    steps = random.integers(1, 4, random.integers(*lengths))
                    ids = np.append(2 + np.cumsum(steps) % (VOCAB_SIZE - 2), EOS)
                    pair.write(ids, np.array([len(ids)]))
            for suffix in (".bin", ".idx"):
                writer.add(writer.staging / (stem + suffix), stem + suffix)
            splits[name] = Split(
                shards=(stem,),
                shard_tokens=(pair.tokens,),
                continues=(False,),
                documents=count,
                tokens=pair.tokens,
                samples=-(-pair.tokens // sequence_length),
            )
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        with writer.create("tokenizer/tokenizer.json") as path:
            tokenizer.save(str(path))
            digest = hash_file(path)
        with writer.create("tokenizer/tokenizer_config.json") as path:
            path.write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}')
        facts = ShardsFacts(
            tokenizer=TokenizerFacts(sha256=digest, vocab_size=VOCAB_SIZE, bos_id=None, eos_id=EOS),
            dtype="uint16",
            sequence_length=sequence_length,
            **splits,
        )
        writer.commit("shard", facts, {}, {})
    return uri


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a small shards artifact."""
    return write_shards(str(tmp_path_factory.mktemp("shards")))


@pytest.fixture
def make_shards(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a shards artifact of a wanted shape."""
    return lambda **shape: write_shards(str(tmp_path / "shards"), **shape)
