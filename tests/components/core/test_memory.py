"""The memory estimate against the models themselves: parameters exactly, activations by what autograd saves."""

import pytest

from crosstrain.components.core.memory import FP32, GIB, HALF, MOMENTS, Cut, Shape, estimate_training, estimate_tuning
from crosstrain.components.core.presets import PRESETS

VOCAB = 384


def shape(preset: str, vocab: int = VOCAB) -> Shape:
    return Shape.read(PRESETS[preset], vocab)


def model(preset: str, device: str = "meta"):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **PRESETS[preset]))


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_counted_exactly(preset):
    assert shape(preset).parameters == sum(one.numel() for one in model(preset).parameters())


def test_an_adapter_is_counted_as_peft_makes_it():
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(model("tiny", "cpu"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    trained = sum(one.numel() for one in tuned.parameters() if one.requires_grad)
    assert shape("tiny").adapter(4) == trained


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("preset", "tokens"), [("tiny", 256), ("125m", 64)])
def test_activations_are_near_what_autograd_saves(preset, tokens, half):
    import torch

    net = model(preset, "cpu")
    own = {one.untyped_storage().data_ptr() for one in net.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.arange(tokens)[None] % VOCAB
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        net(input_ids=ids, labels=ids, position_ids=torch.arange(tokens)[None], use_cache=False)
    measured = sum(one.untyped_storage().nbytes() for key, one in saved.items() if key not in own)
    estimated = estimate_training(shape(preset), Cut(tokens), half)
    copies = estimated.weights - FP32 * shape(preset).parameters
    assert estimated.activations + copies == pytest.approx(measured, rel=0.25)


def test_state_is_shared_by_the_ranks_that_shard_it():
    sizes = shape("8b", 128_256)
    whole, shared = (estimate_training(sizes, Cut(1, shard=ranks), half=True) for ranks in (1, 16))
    assert whole.optimizer == MOMENTS * sizes.parameters and shared.optimizer == whole.optimizer / 16
    assert shared.gradients == whole.gradients / 16
    gathered = FP32 * (2 * sizes.block + sizes.embeddings)
    assert shared.weights == pytest.approx((HALF + FP32 / 16) * sizes.parameters + gathered)
    assert whole.total / GIB == pytest.approx(18 * 8.03e9 / GIB, rel=0.01)
    halves = estimate_training(sizes, Cut(4096, tensor=2, pipeline=2), half=True)
    assert halves.optimizer == whole.optimizer / 4


def test_recomputing_keeps_less():
    kept = [estimate_training(shape("8b"), Cut(8192, recompute=how), half=True).activations
            for how in ("none", "selective", "full")]  # fmt: skip
    assert kept[0] > 1.2 * kept[1] and kept[1] > 3 * kept[2]


@pytest.mark.parametrize(("half", "bytes_of_a_logit"), [(True, 2 + 4 + 4), (False, 4 + 4 + 4)])
def test_logits_their_copy_and_gradient_are_held_once_and_blocks_for_each_pass_in_flight(half, bytes_of_a_logit):
    def activations(vocab: int, in_flight: int) -> float:
        return estimate_training(shape("tiny", vocab), Cut(100, in_flight=in_flight), half).activations

    logits = activations(2000, 1) - activations(1000, 1)
    assert logits == 100 * 1000 * bytes_of_a_logit
    blocks = activations(1000, 1) - logits
    assert activations(1000, 3) == pytest.approx(3 * blocks + logits)


def test_a_frozen_base_has_no_gradients():
    sizes = shape("8b", 128_256)
    tuned = estimate_tuning(sizes, Cut(1), rank=16, base_bytes=HALF)
    assert tuned.weights / sizes.parameters == pytest.approx(2, rel=0.02)
    assert tuned.optimizer == 2 * tuned.gradients == MOMENTS * sizes.adapter(16)
    part = estimate_tuning(sizes, Cut(1, tensor=4, pipeline=2), rank=16, base_bytes=HALF)
    assert tuned.weights - part.weights == pytest.approx(HALF * sizes.parameters * 7 / 8)


def test_a_configuration_that_lacks_a_size_is_refused():
    with pytest.raises(ValueError, match="has no 'intermediate_size'"):
        Shape.read({"hidden_size": 64, "num_attention_heads": 4}, 10)
