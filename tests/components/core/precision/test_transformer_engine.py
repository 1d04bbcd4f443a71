"""The TransformerEngine backend over a stand-in with its recorded signatures: swap, state, micro-batches, refusals."""

import builtins
import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from crosstrain.components.core.precision import Precision, Surroundings, choose

CUDA = torch.device("cuda")
IDS = torch.arange(64)[None] % 64


def te(recipe: str = "current", **options: Any) -> Precision:
    return choose("fp8", CUDA, recipe=recipe, **options)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_the_recipe_asked_for_is_the_one_that_runs(engine, gpu, llama, recipe):
    if recipe == "mxfp8":
        gpu("NVIDIA B200", (10, 0))
    precision = te(recipe, amax_history=16)
    classes = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
    probes = {"block": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}
    assert engine.asked == [probes.get(recipe, "is_fp8_available")]
    assert (precision.name, precision.emulated) == (f"fp8-transformer-engine-{recipe}", False)
    assert precision.token_multiple == {"block": 128, "mxfp8": 32}.get(recipe, 16)
    model = llama()
    precision.convert(model)
    with precision.autocast():
        assert engine.depth[-1]["enabled"] and engine.depth[-1]["recipe"].name == classes.get(
            recipe, "MXFP8BlockScaling"
        )
        model(input_ids=IDS)
    assert engine.depth == []
    higher = precision.fallback()
    assert higher is not None and higher.name == "bf16"


@pytest.mark.parametrize("bias", [False, True])
def test_swap_and_back_change_no_parameter_no_name_and_no_logit(engine, llama, tmp_path, bias):
    model = llama(attention_bias=bias, tie_word_embeddings=False)
    before = {name: id(item) for name, item in model.named_parameters()}
    keys, plain = set(model.state_dict()), model(input_ids=IDS).logits
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    precision = te()
    assert precision.convert(model) == 14
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "TransformerEngineLinear"
    assert type(model.lm_head) is nn.Linear
    assert {name: id(item) for name, item in model.named_parameters()} == before
    assert set(model.state_dict()) == keys, "no _extra_state, even while converted"
    with precision.autocast():
        assert torch.equal(model(input_ids=IDS).logits, plain)
    model.load_state_dict(model.state_dict())
    precision.restore(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(type(module).__module__.startswith(("torch.nn", "transformers")) for module in model.modules())
    model.save_pretrained(tmp_path)
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path)(input_ids=IDS).logits, plain)


def test_a_missing_weight_is_fatal_and_missing_extra_state_is_not(engine, llama):
    model = llama()
    te().convert(model)
    weights = model.state_dict()
    model.load_state_dict(weights)
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*up_proj\.weight"):
        model.load_state_dict(weights)


def test_head_and_ends_stay_out(engine, llama):
    model = llama(num_hidden_layers=4, tie_word_embeddings=False)
    te(keep_first=1, keep_last=2).convert(model)
    swapped = {name for name, module in model.named_modules() if type(module).__name__ == "TransformerEngineLinear"}
    assert len(swapped) == 7 and all(name.startswith("model.layers.1.") for name in swapped)


def passes(engine: Any, precision: Precision, model: nn.Module, first: bool | None) -> set[bool | None]:
    engine.micro_batches.clear()
    with precision.autocast(first):
        model(input_ids=IDS)
    assert len(engine.micro_batches) == 14
    return set(engine.micro_batches)


def test_fp8_weights_are_kept_over_micro_batches_and_never_into_validation(engine, llama):
    model, precision = llama(), te()
    precision.check(model.config)
    precision.convert(model)
    assert passes(engine, precision, model, True) == {True}
    assert passes(engine, precision, model, False) == {False}
    assert passes(engine, precision, model, None) == {None}


@pytest.mark.parametrize("around", [Surroundings(fsdp=True), Surroundings(compile=True), Surroundings(recompute=True)])
def test_fp8_weights_are_not_kept_under_fsdp2_compile_or_recomputation(engine, llama, around):
    model, precision = llama(), te()
    precision.check(model.config, around)
    precision.convert(model)
    assert passes(engine, precision, model, True) == {None}


def test_recomputed_passes_run_in_the_same_recipe_and_keep_no_weights(engine, llama):
    """The stand-in refuses to compute outside te.autocast, and recomputation in backward is outside the loop's."""
    model, precision = llama(), te()
    precision.check(model.config, Surroundings(recompute=True))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    precision.convert(model)
    with precision.autocast(True):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    engine.micro_batches.clear()
    loss.backward()
    assert engine.micro_batches == [None] * 14 and engine.depth == []


def test_the_amax_group_is_passed_on(engine, llama):
    precision, group = te("delayed"), object()
    precision.reduce_over(group)  # type: ignore[arg-type]
    with precision.autocast():
        assert engine.depth[-1]["amax_reduction_group"] is group


def scales_of(layer: Any) -> dict[str, Any]:
    return {key: (value.scale, value.amax_history) for key, value in layer.fp8_meta.items()}


def test_delayed_scales_go_to_checkpoints_as_plain_tensors_and_outlive_a_fallback(engine, llama):
    model, precision = llama(), te("delayed", amax_history=4)
    precision.convert(model)
    assert precision.state() == {}, "nothing was cast yet"
    with precision.autocast():
        model(input_ids=IDS)
    layer = model.model.layers[1].mlp.down_proj
    layer.fp8_meta["scaling_bwd"].scale[0] = 1024.0
    layer.fp8_meta["scaling_fwd"].amax_history[3, 1] = 7.0
    saved = precision.state()
    name = "model.layers.1.mlp.down_proj"
    assert len(saved) == 14 * 4 and saved[f"{name}.scale_backward"].tolist() == [1024.0, 1.0]
    assert saved[f"{name}.amax_history_forward"][3].tolist() == [0.0, 7.0, 0.0]
    precision.restore(model)
    assert precision.state().keys() == saved.keys(), "saved while another precision is in force"
    precision.convert(model)
    assert layer.fp8_meta["scaling_bwd"].scale[0] == 1024.0 and layer.fp8_meta["scaling_fwd"].amax_history[3, 1] == 7.0
    for order in ("before", "after"):
        other, again = llama(), te("delayed", amax_history=4)
        if order == "before":
            again.load_state(saved)
        again.convert(other)
        if order == "after":
            again.load_state(saved)
        assert {key: value.tolist() for key, value in again.state().items()} == {
            k: v.tolist() for k, v in saved.items()
        }


def test_a_checkpoint_without_scales_starts_them_anew_and_another_recipes_is_refused(engine, llama, caplog):
    model, precision = llama(num_hidden_layers=1), te("delayed", amax_history=4)
    precision.convert(model)
    with caplog.at_level(logging.WARNING):
        precision.load_state({"model.layers.0.mlp.up_proj.scale_forward": torch.full((3,), 2.0)})
    assert "model.layers.0.self_attn.q_proj.scale_forward is not in the checkpoint" in caplog.text
    assert model.model.layers[0].mlp.up_proj.fp8_meta["scaling_fwd"].scale.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="another fp8_recipe or fp8_amax_history"):
        precision.load_state({"model.layers.0.mlp.up_proj.amax_history_forward": torch.zeros(8, 3)})


def test_stateless_recipes_have_no_state(engine, llama):
    model, precision = llama(), te()
    precision.convert(model)
    with precision.autocast():
        model(input_ids=IDS)
    assert precision.state() == {}
    precision.load_state({})


@pytest.mark.parametrize(
    ("recipe", "around", "words"),
    [
        ("current", Surroundings(tensor_parallel=2), "tensor_parallel 2.*use fp8_recipe tensorwise"),
        ("delayed", Surroundings(compile=True), "torch.compile; use fp8_recipe current"),
        ("delayed", Surroundings(recompute=True), "recomputed.*use fp8_recipe current"),
    ],
)
def test_what_transformer_engine_cannot_do_is_refused_with_an_alternative(engine, llama, recipe, around, words):
    with pytest.raises(ValueError, match=words):
        te(recipe).check(llama().config, around)


def test_its_own_reason_is_told_when_it_refuses_the_device(engine):
    engine.available = (False, "CublasLt version 12.1.3.x or higher required for FP8 execution on Ada.")
    with pytest.raises(ValueError, match=r"refuses it here: CublasLt version 12\.1\.3.*tensorwise"):
        te()


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "recipe", "words"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "13.0", "current", r"A100.*8\.0 and no fp8 units.*precision bf16"),
        ("NVIDIA L40S", (8, 9), "13.0", "block", r"L40S.*8\.9, and it takes 9\.0"),
        ("NVIDIA H100", (9, 0), "12.8", "block", r"CUDA 12\.8, and it takes 12\.9"),
        ("NVIDIA H100", (9, 0), "13.0", "mxfp8", r"H100.*9\.0, and it takes 10\.x"),
        ("NVIDIA RTX 5090", (12, 0), "13.0", "mxfp8", r"12\.0, and it takes 10\.x"),
    ],
)
def test_a_device_without_the_units_is_refused_before_anything_is_imported(
    monkeypatch, gpu, name, capability, cuda, recipe, words
):
    gpu(name, capability, cuda)
    monkeypatch.setattr(builtins, "__import__", _no_engine(builtins.__import__))
    with pytest.raises(ValueError, match=words):
        te(recipe)


def _no_engine(real: Any) -> Any:
    def load(name: str, *args: Any, **words: Any) -> Any:
        assert not name.startswith("transformer_engine"), "imported too early"
        return real(name, *args, **words)

    return load


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'transformer_engine'"),
        RuntimeError("Found empty `transformer-engine` meta package installed."),
        RuntimeError("transformer_engine_torch shared object not found."),
        OSError("libcuda.so.1: cannot open shared object file"),
    ],
)
def test_every_way_that_its_import_fails_is_one_clear_error(monkeypatch, gpu, error):
    gpu()
    real = builtins.__import__

    def load(name: str, *args: Any, **words: Any) -> Any:
        if name.startswith("transformer_engine"):
            raise error
        return real(name, *args, **words)

    monkeypatch.setattr(builtins, "__import__", load)
    with pytest.raises(ValueError, match=r"needs TransformerEngine.*pip install .*use fp8_recipe tensorwise") as told:
        te()
    assert str(error)[:20] in str(told.value) and "\n" not in str(told.value)


def test_an_environment_that_bends_a_recipe_is_refused(engine, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    with pytest.raises(ValueError, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES is set"):
        te("block")
