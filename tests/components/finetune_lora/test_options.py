"""Initialisations from the base, modules trained whole, new tokens: what is saved fits the original base."""

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstrain.components.core import training as training_module
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.finetune_lora import adapter as adapters
from crosstrain.components.finetune_lora import plain
from crosstrain.components.finetune_lora.config import Config

IDS = torch.arange(60).reshape(2, 30) * 7 % 350


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(IDS).logits.float()


@pytest.fixture
def in_memory(monkeypatch) -> list[torch.Tensor]:
    """Logits of the model in memory, as it is when training ends."""
    found: list[torch.Tensor] = []
    train = training_module.train

    def watched(model: Any, *rest: Any, **options: Any) -> Any:
        outcome = train(model, *rest, **options)
        found.append(logits(model))
        return outcome

    monkeypatch.setattr(plain, "train", watched)
    return found


def reloaded(base: Artifact, tuned: Artifact, dtype: str = "float32") -> Any:
    model = AutoModelForCausalLM.from_pretrained(base.fetch_all(), dtype=dtype)
    settings = json.loads(base.read("config.json"))
    tokenizer = tuned.manifest.by_path.get("tokenizer.json")
    if tokenizer is not None:
        size = len(AutoTokenizer.from_pretrained(tuned.fetch_all()))
        if size > settings["vocab_size"]:
            model.resize_token_embeddings(size)
    return PeftModel.from_pretrained(model, tuned.fetch_all())


@pytest.fixture
def merge(tmp_path):
    def run(base: Artifact, tuned: Artifact, **options: Any) -> Artifact:
        values = {"model": base.uri, "adapter": tuned.uri, "output": str(tmp_path / "merged"), **options}
        return execute("merge", load_config("merge").decode(values)).artifact

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4", "rslora": True},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "olora", "method": "dora"},
        {"init_lora_weights": "pissa", "modules_to_save": ("norm", "lm_head")},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_what_began_with_the_bases_part_fits_the_original_base(
    save_model, import_model, corpus, finetune, pairs, in_memory, merge, tmp_path, options
) -> None:
    base = import_model(save_model(tmp_path / "base"))
    tuned = finetune(base, corpus(pairs), steps=10, **options).artifact
    settings = json.loads(tuned.read("adapter_config.json"))
    assert (settings["init_lora_weights"], settings["r"], tuned.facts.rank) == (True, 8, 8)
    assert settings["lora_alpha"] == tuned.facts.alpha == pytest.approx(8 * (2**0.5 if options.get("rslora") else 2))
    original = logits(AutoModelForCausalLM.from_pretrained(base.fetch_all()))
    again = logits(reloaded(base, tuned))
    assert (again - original).abs().max() > 1
    torch.testing.assert_close(again, in_memory[0], rtol=0, atol=2e-3)
    merged = AutoModelForCausalLM.from_pretrained(merge(base, tuned).uri)
    torch.testing.assert_close(logits(merged), in_memory[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("initialisation", ["pissa", "olora"])
def test_the_difference_has_the_bits_of_pefts_own_conversion(save_model, tmp_path, initialisation, rslora) -> None:
    base = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "base"))
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"],
        init_lora_weights=initialisation, use_rslora=rslora,
    )  # fmt: skip
    tuned = get_peft_model(base, settings)
    wanted = adapters.expected(tuned)
    config = tuned.peft_config["default"]
    config.init_lora_weights = True
    tuned.save_pretrained(tmp_path / "initial")
    config.init_lora_weights = initialisation
    trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    adapters.save_adapter(tuned, {name: p.detach() for name, p in trained.items()}, wanted, tmp_path / "ours", "x")
    tuned.save_pretrained(tmp_path / "peft", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    one, other = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("ours", "peft"))
    assert {key for key in one if one[key] != other[key]} <= {"base_model_name_or_path", "target_modules"}


def test_factors_that_did_not_move_are_found(save_model, tmp_path) -> None:
    base = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "base"))
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora"))
    wanted = adapters.expected(tuned)
    weights = {name: p.detach() for name, p in tuned.named_parameters() if p.requires_grad}
    adapters.save_adapter(tuned, weights, wanted, tmp_path / "still", "x")
    with pytest.raises(ValueError, match=r"q_proj: the factors are as they were, so nothing was learned"):
        adapters.check_adapter(tmp_path / "still", wanted, "lora")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocabulary", [350, 384], ids=["resized", "padded"])
def test_new_tokens_are_learned_saved_and_merged(
    save_model, import_model, corpus, finetune, in_memory, merge, tmp_path, tied, vocabulary
) -> None:
    base = import_model(save_model(tmp_path / "base", tie_word_embeddings=tied, vocab_size=vocabulary))
    new = ("<call>", "<result>")
    rows = [{"prompt": f"<call> add {n}", "completion": f"<result> {n}"} for n in range(8)]
    tuned = finetune(base, corpus(rows), steps=20, new_tokens=new).artifact
    model = reloaded(base, tuned)
    torch.testing.assert_close(logits(model), in_memory[0], rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tuned.fetch_all())
    assert tokenizer.convert_tokens_to_ids(list(new)) == [350, 351]
    assert tokenizer("a<call>b", add_special_tokens=False).input_ids[1] == 350
    rows_of_new = model.get_base_model().get_input_embeddings().weight[350:352]
    assert not torch.equal(rows_of_new[0], rows_of_new[1])  # they began alike, and were learned
    merged = merge(base, tuned)
    loaded = AutoModelForCausalLM.from_pretrained(merged.uri)
    assert merged.facts.vocab_size == loaded.config.vocab_size == max(352, vocabulary)
    assert merged.facts.tied_embeddings == tied == (loaded.lm_head.weight is loaded.model.embed_tokens.weight)
    torch.testing.assert_close(logits(loaded), in_memory[0], rtol=0, atol=2e-3)
    assert AutoTokenizer.from_pretrained(merged.uri).convert_tokens_to_ids("<result>") == 351


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_modules_trained_whole_are_fp32_on_a_bf16_base(
    save_model, import_model, corpus, finetune, pairs, in_memory, merge, tmp_path, tied
) -> None:
    base = import_model(save_model(tmp_path / "base", tie_word_embeddings=tied, dtype="bfloat16"))
    saved = ("embed_tokens", "norm") if tied else ("embed_tokens", "lm_head", "norm")
    tuned = finetune(base, corpus(pairs), steps=10, base_dtype="bfloat16", modules_to_save=saved).artifact
    tensors = load_file(tuned.fetch("adapter_model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    whole = {name.removeprefix("base_model.model.") for name in tensors if "lora" not in name}
    assert whole == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    before = load_file(base.fetch("model.safetensors"))
    assert all(
        not torch.equal(before[name].float(), tensors[f"base_model.model.{name}"]) for name in before.keys() & whole
    )
    merged = merge(base, tuned)
    assert merged.facts.dtype == "bfloat16"
    assert merged.facts.tied_embeddings == tied
    again = logits(AutoModelForCausalLM.from_pretrained(merged.uri, dtype="bfloat16"))
    assert (again - in_memory[0]).abs().mean() < 0.1 * in_memory[0].abs().mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pisa"}, r"init_lora_weights: "),
        ({"init_lora_weights": "olora", "rank": 33}, r"rank 33 is above 32, all that model.layers.0.self_attn.k_proj"),
        ({"modules_to_save": ("nrm",)}, r"no module with a weight is called 'nrm'; there are .*norm"),
        ({"modules_to_save": ("lm_head",), "target_modules": ("lm_head",)}, r"lm_head is in target_modules too"),
        ({"modules_to_save": ("v_proj",)}, r"model.layers.0.self_attn.v_proj is in target_modules too"),
        ({"new_tokens": ("<|end|>",)}, r"'<\|end\|>' is a token of .* already"),
        ({"new_tokens": ("<a>", "<a>")}, r"'<a>' is blank or there twice"),
    ],
)
def test_what_cannot_be_is_refused(
    save_model, import_model, corpus, finetune, pairs, tmp_path, options, message
) -> None:
    base = import_model(save_model(tmp_path / "base"))
    with pytest.raises(ValueError, match=message):
        finetune(base, corpus(pairs), **options)
    assert not list(tmp_path.glob("adapter.state/*/*"))


def test_the_head_of_a_tied_model_goes_with_its_embedding(save_model, import_model, corpus, finetune, pairs, tmp_path):
    base = import_model(save_model(tmp_path / "base", tie_word_embeddings=True))
    with pytest.raises(ValueError, match="lm_head is tied to embed_tokens in this model; name embed_tokens"):
        finetune(base, corpus(pairs), modules_to_save=("lm_head",))


def test_a_resumed_run_of_whole_modules_and_taken_out_factors_has_the_same_bytes(
    save_model, import_model, corpus, finetune, pairs, tmp_path
) -> None:
    import shutil

    base = import_model(save_model(tmp_path / "base", tie_word_embeddings=True))
    data = corpus(pairs)
    options = {
        "steps": 4, "checkpoint_every": 2, "keep_checkpoints": 9, "init_lora_weights": "pissa", "new_tokens": ("<a>",),
    }  # fmt: skip
    whole = finetune(base, data, "whole", **options).artifact
    (run,) = (tmp_path / "whole.state").iterdir()
    shutil.rmtree(run / "step-00000004")
    resumed = finetune(base, data, "resumed", state=str(tmp_path / "whole.state"), **options)
    assert resumed.artifact.manifest.sha256 == whole.manifest.sha256
    assert Config(model="m", data="d", output="o").init_lora_weights == "default"
