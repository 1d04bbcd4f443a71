"""Tiny models, tokenizers and adapters, made on the spot; nothing is downloaded and torch is imported on use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import AdapterFacts
from crosstrain.components.core.step import execute, load_config

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEXT = (
    "The quick brown fox jumps over the lazy dog. ",
    "A quiet river ran past seven old mills and under a bridge of grey stone. ",
    "def add(a, b):\n    return a + b\n",
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 384 ids with BOS, EOS (also the pad) and a chat template, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|start|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text * 20 for text in TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|eos|>",
        additional_special_tokens=["<|start|>", "<|end|>"],
    )  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def save_model(tokenizer_folder: Path) -> Callable[..., Path]:
    """Write a small random causal language model as a Hugging Face folder."""

    def save(
        folder: Path,
        kind: str = "llama",
        dtype: str = "float32",
        shard: str = "1GB",
        tokenizer: bool = True,
        **options: Any,
    ) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(7)
        settings = {
            "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 1,
            "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
        }  # fmt: skip
        config = AutoConfig.for_model(kind, **settings | options)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for parameter in model.parameters():
            parameter.data.mul_(4)  # larger than the default, so that logits differ between inputs
        model.save_pretrained(folder, max_shard_size=shard)
        if tokenizer:
            AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def import_model(tmp_path: Path) -> Callable[[Path], Artifact]:
    """Take a model folder in as an artifact."""

    def take(folder: Path) -> Artifact:
        config = load_config("import_model").decode(
            {"source": str(folder), "output": str(tmp_path / f"{folder.name}.model")}
        )
        return execute("import_model", config).artifact

    return take


@pytest.fixture
def save_adapter(tmp_path: Path) -> Callable[..., Artifact]:
    """Make a peft adapter with random factors on an imported model, as an artifact.

    `change(peft_model)` may alter the model before it is saved.
    """

    def save(
        base: Artifact, name: str = "adapter", change: Callable[[Any], None] = lambda model: None, **options: Any
    ) -> Artifact:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(11)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
        model = AutoModelForCausalLM.from_pretrained(base.fetch_all())
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        for key, parameter in tuned.named_parameters():
            if "lora_magnitude" in key:
                parameter.data.mul_(1 + 0.1 * torch.rand_like(parameter))
            elif "lora_" in key:
                parameter.data.normal_(std=0.05)
            elif "modules_to_save" in key:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
        change(tuned)
        folder = tmp_path / f"{name}.peft"
        tuned.save_pretrained(folder)
        facts = AdapterFacts(
            method="dora" if settings.get("use_dora") else "lora", rank=4, alpha=8, target_modules=("q_proj",),
            trainable_parameters=1, base_parameters=base.facts.parameters, base_sha256=base.manifest.sha256, steps=1,
            tokens_seen=1,
        )  # fmt: skip
        with ArtifactWriter(str(tmp_path / name)) as out:
            out.add_folder(folder)
            return out.commit("finetune_lora", facts, {}, {"model": base})

    return save
