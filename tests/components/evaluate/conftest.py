"""Small real inputs: a byte-level tokenizer, shards in the project's format, random Llamas as model artifacts."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import AdapterFacts, ShardsFacts, Split
from crosstrain.components.core.model import (
    LOG_NAME,
    add_model,
    add_tokenizer,
    build_model,
    count_parameters,
    llama_config,
    llama_facts,
)
from crosstrain.components.core.tokenizer import Tokenizer, load_tokenizer
from crosstrain.components.core.tokens import PairWriter, token_dtype

LENGTH = 32
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "the quick brown fox <b>jumps</b> over the lazy dög & runs; é has two bytes, 語 three"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids, EOS included."""
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    folder.mkdir(parents=True)
    trained.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder, engine="tokenizers")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "own", 290)


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "other", 280)


def random_documents(tokenizer: Tokenizer, count: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of 2 to 60 ids, EOS last; most do not end where a sample ends."""
    source = np.random.default_rng(seed)
    ids = tokenizer.encode_batch([TEXT])[0]
    documents = []
    for _ in range(count):
        length, start = int(source.integers(1, 60)), int(source.integers(0, ids.size))
        documents.append(np.append(np.roll(ids, -start)[:length], tokenizer.eos_id))
    return documents


def write_shards(
    uri: Path, tokenizer: Tokenizer, validation: Sequence[np.ndarray], train: Sequence[np.ndarray], length: int = LENGTH
) -> Artifact:
    """A shards artifact of one shard a split."""
    splits = {}
    with ArtifactWriter(str(uri)) as out:
        for name, documents in {"validation": validation, "train": train}.items():
            stem = f"{name}-00000"
            with PairWriter(out.staging / stem, token_dtype(tokenizer.vocab_size)) as pair:
                pair.write(np.concatenate(documents), np.array([ids.size for ids in documents]))
            tokens = sum(ids.size for ids in documents)
            splits[name] = Split(
                shards=(stem,), shard_tokens=(tokens,), continues=(False,), documents=len(documents),
                tokens=tokens, samples=-(-tokens // length),
            )  # fmt: skip
            for suffix in ("bin", "idx"):
                out.add(out.staging / f"{stem}.{suffix}", f"{stem}.{suffix}")
        out.add_folder(tokenizer.folder, "tokenizer/")
        facts = ShardsFacts(tokenizer=tokenizer.facts(), dtype="uint16", sequence_length=length, **splits)
        return out.commit("shard", facts, {}, {})


@pytest.fixture
def make_shards(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Artifact]:
    """Call it with (name, documents=40, seed=0, …): shards of random documents, or of those given."""

    def make(name: str, documents: int | Sequence[np.ndarray] = 40, seed: int = 0, **options: Any) -> Artifact:
        own = options.pop("tokenizer", tokenizer)
        held_out = random_documents(own, documents, seed) if isinstance(documents, int) else documents
        return write_shards(tmp_path / name, own, held_out, random_documents(own, 60, seed + 1), **options)

    return make


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Artifact]:
    """Call it with (name, shards, seed, change, log, …): a random Llama, changed before it is saved."""

    def make(
        name: str,
        shards: Artifact,
        seed: int = 0,
        change: Callable[[torch.nn.Module], None] | None = None,
        log: Sequence[Mapping[str, Any]] = (),
        precision: str = "fp8-torchao-emulated",
        shape: Mapping[str, Any] = {},
    ) -> Artifact:
        tokenizer = shards.facts.tokenizer
        model = build_model(llama_config({**SHAPE, **shape}, tokenizer), seed, torch.device("cpu"))
        if change is not None:
            with torch.no_grad():
                change(model)
        with ArtifactWriter(str(tmp_path / name)) as out:
            add_model(out, model, torch.float32)
            add_tokenizer(out, shards)
            if log:
                write_log(out, log)
            facts = llama_facts(
                model.config, parameters=count_parameters(model), dtype="float32",
                tokenizer_sha256=tokenizer.sha256, precision=precision,
            )  # fmt: skip
            return out.commit("train_fp8", facts, {}, {"shards": shards})

    return make


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Artifact]:
    """Call it with (name, model, shards, log): an adapter artifact with a training log."""

    def make(name: str, model: Artifact, shards: Artifact, log: Sequence[Mapping[str, Any]]) -> Artifact:
        with ArtifactWriter(str(tmp_path / name)) as out:
            write_log(out, log)
            facts = AdapterFacts(
                method="lora", rank=2, alpha=4, target_modules=("q_proj",), trainable_parameters=1, base_parameters=2,
                base_sha256=model.manifest.sha256, steps=len(log), tokens_seen=1,
            )  # fmt: skip
            return out.commit("finetune_lora", facts, {}, {"model": model, "data": shards})

    return make


def write_log(out: ArtifactWriter, log: Sequence[Mapping[str, Any]]) -> None:
    with out.create(LOG_NAME) as path:
        path.write_text("".join(json.dumps(record) + "\n" for record in log))
