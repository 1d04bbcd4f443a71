"""Small corpora, small tokenizers, and the way from one to the other."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.tokenizer import load_tokenizer
from crosstrain.components.core.tokens import Pair

SAMPLE = "The quick brown fox jumps over the lazy dog, and 1234 more. été 日本\n" * 12


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a byte-level BPE folder: <|begin|> is id 0, <|end|> (EOS) id 1; `bos`: a template puts <|begin|> first."""

    def make(bos: bool = False, extra: int = 0) -> Path:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|begin|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator([SAMPLE], trainer)
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
            )
        content = json.loads(tokenizer.to_str())
        for number in range(extra):
            content["model"]["vocab"][f"unused{number}"] = len(content["model"]["vocab"])
        folder = tmp_path_factory.mktemp("tokenizer")
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
        return folder

    return make


@pytest.fixture(scope="session")
def plain_tokenizer(make_tokenizer: Callable[..., Path]) -> Path:
    """A tokenizer that wants no BOS."""
    return make_tokenizer()


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., str]:
    """Write files and import them as a corpus; its URI."""
    numbers = itertools.count()

    def make(files: dict[str, bytes | str], **options: Any) -> str:
        folder = tmp_path / f"source-{next(numbers)}"
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        values = {"source": str(folder), "output": f"{folder}.corpus", **options}
        return execute("import_data", load_config("import_data").decode(values)).artifact.uri

    return make


@pytest.fixture
def tokenize(tmp_path: Path, plain_tokenizer: Path) -> Callable[..., Artifact]:
    """Tokenize a corpus in this process, with the plain tokenizer unless another is given."""
    numbers = itertools.count()

    def run(corpus: str, **options: Any) -> Artifact:
        values = {"corpus": corpus, "output": str(tmp_path / f"tokens-{next(numbers)}"), "workers": 1, **options}
        if not values.keys() & {"tokenizer", "tokenizer_uri", "vocab_size"}:
            values["tokenizer_uri"] = str(plain_tokenizer)
        return execute("tokenize", load_config("tokenize").decode(values)).artifact

    return run


@pytest.fixture
def ids_of() -> Callable[[Artifact], list[list[int]]]:
    """The ids of every document."""

    def read(artifact: Artifact) -> list[list[int]]:
        folder = artifact.fetch_all()
        pairs = [Pair(folder / stem) for stem in artifact.facts.parts]
        return [pair[i].tolist() for pair in pairs for i in range(len(pair))]

    return read


@pytest.fixture
def texts_of(ids_of: Callable[[Artifact], list[list[int]]]) -> Callable[[Artifact], list[str]]:
    """The text of every document, without the EOS that ends it."""

    def read(artifact: Artifact) -> list[str]:
        tokenizer = load_tokenizer(artifact.fetch_all() / "tokenizer")
        documents = ids_of(artifact)
        assert all(ids[-1] == tokenizer.eos_id for ids in documents)
        return [tokenizer.decode(ids[:-1]) for ids in documents]

    return read
