"""Pages and their code blocks, a tiny model, and an environment without kfp."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def blocks() -> Callable[[str, str], list[str]]:
    """The code blocks of one language on a page, such as ("docs/reuse.md", "python")."""

    def found(page: str, language: str) -> list[str]:
        return [text for kind, text in BLOCK.findall((ROOT / page).read_text()) if kind == language]

    return found


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain Hugging Face folder: a random Llama of some thousand parameters, with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the pump is loud, check the valve"], trainer)
    folder = tmp_path_factory.mktemp("models") / "llama"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def without_kfp(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing kfp fails, as where it is not installed."""
    for name in ("kfp", "kfp_kubernetes"):
        package = tmp_path / "blocked" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {name!r}", name="{name}")\n')
    path = os.pathsep.join(filter(None, [str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
