"""Named Llama shapes, and the reading of a user's own; plain dictionaries, so that nothing heavy is imported.

The shapes of `1b`, `3b` and `8b` are those of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B (config.json of the
meta-llama repositories). The vocabulary is never part of a preset: it is the tokenizer's, exactly. It needs no
rounding up, because embedding and lm_head stay out of fp8, and so there is nothing to trim at export.
"""

import json
from typing import Any, Literal

from crosstrain.components.core.storage import open_store

PresetName = Literal["debug", "tiny", "125m", "350m", "1b", "3b", "8b"]

_SMALL: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True}


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "debug": {**_SMALL, **_shape(64, 128, 2, 4, 2), "max_position_embeddings": 512},
    "tiny": {**_SMALL, **_shape(192, 512, 4, 6, 2), "max_position_embeddings": 2048},
    "125m": {**_SMALL, **_shape(768, 2048, 12, 12, 4), "max_position_embeddings": 4096},
    "350m": {**_SMALL, **_shape(1024, 2816, 24, 16, 4), "max_position_embeddings": 4096},
    "1b": {**_llama3(32.0), **_shape(2048, 8192, 16, 32, 8), "tie_word_embeddings": True},
    "3b": {**_llama3(32.0), **_shape(3072, 8192, 28, 24, 8), "tie_word_embeddings": True},
    "8b": {**_llama3(8.0), **_shape(4096, 14_336, 32, 32, 8), "tie_word_embeddings": False},
}
"""Preset to the fields of a Llama configuration, as transformers names them."""


def read_shape(preset: PresetName, model_config_json: str) -> dict[str, Any]:
    """The fields of the model to build: a user's configuration, or else the preset's.

    Args:
        preset: Name in PRESETS; used when `model_config_json` is empty.
        model_config_json: JSON text of a Llama config.json, or the URI where one lies.

    Raises:
        ValueError: not JSON, not an object, or a model of another architecture.
        FileNotFoundError: nothing lies at the URI.
    """
    text = model_config_json.strip()
    if not text:
        return dict(PRESETS[preset])
    if not text.startswith("{"):
        folder, _, name = text.rpartition("/")
        text = open_store(folder or ".").read(name).decode()
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"model_config_json: not JSON ({error})") from None
    if not isinstance(fields, dict) or fields.get("model_type", "llama") != "llama":
        found = fields.get("model_type") if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"model_config_json: a Llama configuration is wanted (model_type llama), and this is {found}")
    dropped = ("vocab_size", "model_type", "architectures", "transformers_version", "torch_dtype", "dtype",
               "bos_token_id", "eos_token_id", "pad_token_id", "use_cache")  # fmt: skip
    return {name: value for name, value in fields.items() if name not in dropped}
