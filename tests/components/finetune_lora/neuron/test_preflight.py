"""What optimum-neuron would ignore or break is refused before anything is compiled, with a reason and a way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.neuron.options import choose_backend
from crosstrain.components.finetune_lora.neuron.preflight import (
    Layout,
    check_model,
    check_options,
    choose_targets,
    compatible_settings,
    plan_layout,
)

LLAMA_1B = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
            "vocab_size": 128256, "num_hidden_layers": 16, "hidden_size": 2048}  # fmt: skip
"""Llama-3.2-1B."""


def config(**options: Any) -> Config:
    return Config.decode({"model": "m", "data": "d", "output": "o", **options})


def layout(tensor: int, pipeline: int = 1) -> Layout:
    return Layout(tensor, pipeline, data=1, accumulation=1, micro_batch=1)


@pytest.mark.parametrize("options, data, reason, way_out", [
    ({"method": "dora"}, "corpus", "loses every magnitude", "backend torch .*TorchNeuron"),
    ({"init_lora_weights": "pissa"}, "corpus", "principal part of one rank's piece", "backend torch"),
    ({"init_lora_weights": "olora"}, "corpus", "principal part of one rank's piece", "backend torch"),
    ({"modules_to_save": ["lm_head"]}, "corpus", "trained whole", "backend torch"),
    ({"new_tokens": ["<a>"]}, "corpus", "sharded embedding", "backend torch"),
    ({"packing": True}, "corpus", "no mask between rows", "neuron.packing=true"),
    ({"activation_checkpointing": "full"}, "corpus", "one of its own", "neuron.gradient_checkpointing=true"),
    ({"compile": True}, "corpus", "Neuron's own compiler", "leave compile false"),
    ({"on_divergence": "fallback"}, "corpus", "cannot go back to a checkpoint", "on_divergence=stop"),
    ({}, "shards", "several documents a sequence", "neuron.packing=true"),
])  # fmt: skip
def test_an_option_that_is_ignored_or_broken_is_refused(options, data, reason, way_out):
    with pytest.raises(ValueError, match=rf"backend optimum_neuron: .*{reason}.*{way_out}") as caught:
        check_options(config(**options), data)
    assert "\n" not in str(caught.value)


def test_every_reason_is_told_at_once_and_what_works_is_let_through():
    with pytest.raises(ValueError, match=r"DoRA.*; compile=True.*; data: shards"):
        check_options(config(method="dora", compile=True), "shards")
    check_options(config(rslora=True, dropout=0.1, init_lora_weights="gaussian", neuron={"packing": True}), "shards")
    check_options(config(state="s3://lake/state"), "corpus")


@pytest.mark.parametrize("backend, device, instance, chosen", [
    ("auto", "auto", "", "torch"),
    ("auto", "auto", "ml.p5.48xlarge", "torch"),
    ("auto", "auto", "ml.trn1.32xlarge", "optimum_neuron"),
    ("auto", "auto", "trn1n.32xlarge", "optimum_neuron"),
    ("auto", "auto", "ml.trn2.48xlarge", "optimum_neuron"),
    ("auto", "neuron", "ml.trn2.48xlarge", "torch"),
    ("optimum_neuron", "auto", "", "optimum_neuron"),
    ("torch", "neuron", "trn3.48xlarge", "torch"),
])  # fmt: skip
def test_the_backend_follows_instance_and_device(backend, device, instance, chosen):
    run_on = RunOn(target="hyperpod", instance_type=instance, image="torch-neuron:1")
    assert choose_backend(backend, device, run_on) == chosen


@pytest.mark.parametrize("backend, device, instance, words", [
    ("optimum_neuron", "cuda", "", "leave device out"),
    ("optimum_neuron", "auto", "ml.p5.48xlarge", "choose backend torch$"),
    ("optimum_neuron", "auto", "trn3.48xlarge", "choose backend torch with device neuron"),
    ("auto", "auto", "trn3.48xlarge", "set device neuron"),
    ("torch", "auto", "ml.trn2.48xlarge", "set device neuron"),
    ("torch", "neuron", "ml.trn1.32xlarge", "TorchNeuron is for trn2 and trn3"),
    ("torch", "neuron", "ml.trn2.48xlarge", "run_on.image: .*no device 'neuron'.*name an image with TorchNeuron"),
])  # fmt: skip
def test_a_backend_that_cannot_run_there_is_refused(backend, device, instance, words):
    with pytest.raises(ValueError, match=words):
        choose_backend(backend, device, RunOn(target="hyperpod", instance_type=instance))


def test_processes_and_batch_are_shared_or_the_nearest_that_can_be_is_named():
    asked = config(global_batch_size=64, micro_batch_size=1, neuron={"tensor_parallel": 8})
    assert plan_layout(asked, 64) == Layout(tensor=8, pipeline=1, data=8, accumulation=8, micro_batch=1)
    with pytest.raises(ValueError, match=r"12 processes do not divide into neuron.tensor_parallel 8"):
        plan_layout(asked, 12)
    with pytest.raises(ValueError, match=r"global_batch_size 64 does not divide into 7 .* nearest: 63 or 70"):
        plan_layout(asked, 56)
    staged = {"neuron": {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_microbatches": 3}}
    with pytest.raises(ValueError, match="pipeline_microbatches 3 does not divide a rank's 4 sequences"):
        plan_layout(config(global_batch_size=8, micro_batch_size=2, **staged), 8)


@pytest.mark.parametrize("ranks, fused", [(1, False), (2, False), (8, False), (16, True), (32, True)])
def test_llama_1b_fits_and_says_when_query_key_and_value_are_one(ranks, fused):
    assert check_model(LLAMA_1B, layout(ranks), fuse_qkv=False) is fused


@pytest.mark.parametrize("change, ranks, stages, fuse, words", [
    ({}, 12, 1, False, "12 is no multiple of the model's 8 key-value heads"),
    ({}, 6, 1, False, "6 does not divide the model's 8 key-value heads"),
    ({"num_attention_heads": 24, "num_key_value_heads": 8}, 16, 1, False, "num_attention_heads 24"),
    ({"intermediate_size": 8190}, 8, 1, False, "intermediate_size 8190"),
    ({"vocab_size": 50257}, 8, 1, False, "vocab_size 50257"),
    ({"num_hidden_layers": 2}, 1, 4, False, "pipeline_parallel 4 is more than its 2 layers"),
    ({"model_type": "gpt2"}, 8, 1, False, "this model is gpt2; choose backend torch"),
    ({"model_type": "granite"}, 8, 2, False, r"\(llama, qwen3 with pipeline_parallel\)"),
    ({}, 8, 1, True, "neuron.fuse_qkv has no effect with 32 query and 8 key-value heads"),
])  # fmt: skip
def test_a_model_that_does_not_divide_is_refused_when_configured(change, ranks, stages, fuse, words):
    with pytest.raises(ValueError, match=words):
        check_model({**LLAMA_1B, **change}, layout(ranks, stages), fuse)


def test_targets_that_share_one_a_go_together():
    assert len(choose_targets(config(), True)) == 7
    assert choose_targets(config(target_modules=["v_proj", "q_proj"]), False) == ["q_proj", "v_proj"]
    with pytest.raises(ValueError, match=r"one layer in this layout.*missing: k_proj\)"):
        choose_targets(config(target_modules=["v_proj", "q_proj"]), True)
    with pytest.raises(ValueError, match=r"one layer always.*missing: up_proj\)"):
        choose_targets(config(target_modules=["gate_proj"]), False)
    with pytest.raises(ValueError, match="'lm_head' cannot be tuned"):
        choose_targets(config(target_modules=["lm_head"]), False)


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 123456.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
])  # fmt: skip
def test_the_rotary_embedding_is_told_in_the_older_words(tmp_path: Path, rope):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope,
                dtype="bfloat16").save_pretrained(tmp_path)  # fmt: skip
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    made = compatible_settings(written)
    assert made["rope_theta"] == rope["rope_theta"] and made["torch_dtype"] == "bfloat16"
    assert (made["rope_scaling"] or {"rope_type": "default"})["rope_type"] == rope["rope_type"]
    assert LlamaConfig(**made).rope_parameters == LlamaConfig(**written).rope_parameters
    assert compatible_settings(made) == made
    with pytest.raises(ValueError, match="differ between layers"):
        compatible_settings({"rope_parameters": {"full_attention": rope, "sliding_attention": rope}})
