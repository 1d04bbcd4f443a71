"""Models as artifacts: built from a shape, loaded from and saved to a plain Hugging Face folder.

What is saved is what transformers itself writes: config.json, generation_config.json, safetensors and the
tokenizer's files at the root, so that any tool reads it without us. Left out on purpose: adapters (the
components that make and merge them know peft) and the conversion between number formats (core/precision).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import ModelFacts, TokenizerFacts

SHARD_SIZE = 5_000_000_000
"""Bytes of the largest safetensors file; a larger model is split into several with an index."""
LOG_NAME = "training_log.jsonl"
"""One JSON object an optimizer step, beside the weights that it led to."""
TOKENIZER_FOLDER = "tokenizer/"
"""Where tokens and shards artifacts keep the tokenizer's files."""


def llama_config(shape: dict[str, Any], tokenizer: TokenizerFacts) -> LlamaConfig:
    """A Llama configuration for a shape and a tokenizer.

    Args:
        shape: Fields as transformers names them, without a vocabulary.
        tokenizer: Gives the vocabulary size and the ids of BOS and EOS.

    Raises:
        ValueError: transformers refuses the fields.
    """
    try:
        config = LlamaConfig(
            **shape,
            vocab_size=tokenizer.vocab_size,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=None,
        )
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"the model's configuration does not fit: {' '.join(str(error).split())}") from None
    if config.num_attention_heads % (config.num_key_value_heads or 1):
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    return config


def check_length(sequence_length: int, config: PretrainedConfig) -> None:
    """Refuse sequences longer than the model's positions, before any training.

    Raises:
        ValueError: the sequence length exceeds max_position_embeddings.
    """
    if sequence_length > config.max_position_embeddings:
        raise ValueError(
            f"sequence length {sequence_length} of the data is above the model's maximum of "
            f"{config.max_position_embeddings} positions; shard with a smaller sequence_length or choose another model"
        )


def build_model(config: LlamaConfig, seed: int, device: torch.device) -> LlamaForCausalLM:
    """A model with random fp32 weights that are a function of configuration and seed."""
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM(config).float()
    return model.to(device)  # type: ignore[arg-type]


def load_model(artifact: Artifact, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """The model of a model artifact, verified against its manifest.

    Args:
        artifact: A model artifact.
        dtype: Type of the parameters in memory.
        device: Where to put it.

    Raises:
        ValueError: a weight of the architecture is missing, which transformers would fill with random numbers.
    """
    disable_progress_bar()
    folder = artifact.fetch_all()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{artifact.uri}: the weights lack {missing[0]} ({len(missing)} in all), which {type(model).__name__} has; "
            "save the model again"
        )
    placed: PreTrainedModel = model.to(torch.device(device))
    return placed


def add_model(writer: ArtifactWriter, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store a model's config.json, generation_config.json and safetensors at the root of an artifact."""
    weights = ((name, item.detach()) for name, item in model.named_parameters())
    add_weights(writer, type(model).__name__, model.config, model.generation_config, weights, dtype)


def add_weights(
    writer: ArtifactWriter,
    architecture: str,
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    """Store a model as transformers would, from parameters that come one at a time.

    Args:
        writer: Of the model artifact.
        architecture: The model's class in transformers.
        config: Its configuration; gets architecture and dtype.
        generation: Its defaults for generating, if it has any.
        weights: Name and whole tensor; tied ones once. At most SHARD_SIZE of them are held.
        dtype: Type to save them in.
    """
    folder = writer.staging / "model"
    folder.mkdir()
    config.architectures, config.dtype = [architecture], str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)
    parts: list[dict[str, torch.Size]] = []
    held: dict[str, torch.Tensor] = {}

    def store() -> None:
        save_file(held, folder / _part(len(parts)), metadata={"format": "pt"})
        parts.append({name: item.shape for name, item in held.items()})
        held.clear()

    for name, item in weights:
        tensor = item.to("cpu", dtype).contiguous()
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > SHARD_SIZE:
            store()
        held[name] = tensor
    store()
    _name_parts(folder, parts, dtype)
    writer.add_folder(folder)


def _part(index: int) -> str:
    return f"part-{index}.safetensors"


def _name_parts(folder: Path, parts: list[dict[str, torch.Size]], dtype: torch.dtype) -> None:
    """Give safetensors files the names that transformers looks for; with an index when there are several."""
    if len(parts) == 1:
        (folder / _part(0)).rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
    for index, name in enumerate(names):
        (folder / _part(index)).rename(folder / name)
    count = sum(shape.numel() for part in parts for shape in part.values())
    index_of = {
        "metadata": {"total_parameters": count, "total_size": count * dtype.itemsize},
        "weight_map": {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part},
    }
    text = json.dumps(index_of, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def add_tokenizer(writer: ArtifactWriter, source: Artifact) -> None:
    """Copy the tokenizer's files of a tokens or shards artifact to the root of another."""
    for file in source.manifest.files:
        if file.path.startswith(TOKENIZER_FOLDER):
            writer.add(source.fetch(file.path), file.path.removeprefix(TOKENIZER_FOLDER))


def count_parameters(model: PreTrainedModel) -> int:
    """Parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def llama_facts(config: LlamaConfig, **facts: Any) -> ModelFacts:
    """The facts that a Llama's configuration tells, joined with those given."""
    return ModelFacts(
        architecture="LlamaForCausalLM",
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        tied_embeddings=bool(config.tie_word_embeddings),
        **facts,
    )
