"""The FLOP formula against torch's own counter, and the table of peaks."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core import flops
from crosstrain.components.core.flops import Flops, device_peak, peak_of, peaks


def llama(tied: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def counted(model: torch.nn.Module, length: int) -> float:
    """FLOPs a token that torch sees in forward and backward."""
    ids = torch.arange(length)[None] % 64
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / length


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [16, 64])
def test_the_formula_is_what_torch_counts(tied, length):
    """Eager attention multiplies the masked half as well; the rotary products are the little that is over."""
    model = llama(tied)
    found = Flops.of(model)
    wanted = found.per_token(length) + 6 * found.attention * length
    assert counted(model, length) == pytest.approx(wanted, rel=0.005)


def test_frozen_weights_have_no_gradient_to_compute():
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    found = Flops.of(model)
    assert 0 < found.trained < 0.2 * found.weights
    wanted = found.per_token(16) + 6 * found.attention * 16
    assert counted(model, 16) == pytest.approx(wanted, rel=0.08)  # the first block's inputs need no gradient


def test_the_narrower_name_counts_first_and_every_peak_is_dated():
    assert (peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA H100 PCIe")) == (989e12, 756e12)
    assert (peak_of("NVIDIA L40S"), peak_of("NVIDIA L4"), peak_of("trn2.48xlarge")) == (362e12, 121e12, 166.75e12)
    assert peak_of("NVIDIA GeForce RTX 4090") is None
    assert all(peak.source and peak.date.year >= 2026 for peak in peaks().values())
    assert not [name for name in peaks() if not re.fullmatch(r"[A-Za-z0-9 ]+", name)]


def test_a_cpu_has_no_peak_and_a_stated_one_counts_before_the_table(monkeypatch, tmp_path):
    assert device_peak(torch.device("cpu"), 100.0) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_peak(torch.device("cuda")) == 989e12
    assert device_peak(torch.device("cuda"), 100.0) == 100e12
    node = tmp_path / "product_name"
    node.write_text("trn1.32xlarge\n")
    monkeypatch.setattr(flops, "INSTANCE_TYPE", node)
    assert device_peak(torch.device("meta")) == 95e12
