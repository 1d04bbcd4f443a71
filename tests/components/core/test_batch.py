"""Batches: targets, padding, document isolation, and a loss that does not depend on how a batch is cut."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core.batch import PAD, PadEmbedding, accept_pads, loss_sum, make_batch
from crosstrain.components.core.data import IGNORE, Sample

CPU = torch.device("cpu")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for item in model.parameters():
        item.data.mul_(3)
    return model


def document(length: int, seed: int) -> Sample:
    ids = np.random.default_rng(seed).integers(0, 64, length)
    labels = ids.copy()
    labels[0] = IGNORE
    return Sample(ids, labels, np.arange(length))


def pack(*parts: Sample) -> Sample:
    return Sample(
        np.concatenate([part.input_ids for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.position_ids for part in parts]),
    )


def loss_of(model: nn.Module, samples: list[Sample], multiple: int = 1) -> float:
    return loss_sum(model, *make_batch(samples, multiple).tensors(CPU)).item()


def test_targets_are_the_next_label():
    batch = make_batch([pack(document(4, 0), document(3, 1))])
    ids = batch.input_ids[0].tolist()
    assert batch.targets[0].tolist() == [*ids[1:4], IGNORE, *ids[5:7], IGNORE]
    assert (batch.labels, batch.tokens) == (5, 7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(attention):
    """The loss of a packed sample is the sum of its documents' losses on their own."""
    model = llama()
    model.set_attn_implementation(attention)
    parts = [document(9, 0), document(14, 1), document(6, 2)]
    alone = sum(loss_of(model, [part]) for part in parts)
    packed = pack(*parts)
    assert loss_of(model, [packed]) == pytest.approx(alone, rel=1e-6)
    joined = Sample(packed.input_ids, packed.labels, np.arange(29))
    assert loss_of(model, [joined]) != pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("multiple", [1, 16])
def test_padding_changes_no_loss(multiple):
    model = llama()
    accept_pads(model)
    samples = [document(9, 0), pack(document(20, 1), document(5, 2))]
    alone = sum(loss_of(model, [part]) for part in samples)
    batch = make_batch(samples, multiple)
    assert batch.input_ids.shape == (2, 25 if multiple == 1 else 32)
    assert batch.tokens == 9 + 25
    assert loss_of(model, samples, multiple) == pytest.approx(alone, rel=1e-6)


def test_what_follows_the_last_label_is_padding():
    sample = document(12, 0)
    labels = sample.labels.copy()
    labels[7:] = IGNORE
    batch = make_batch([Sample(sample.input_ids, labels, sample.position_ids)], 16)
    assert batch.input_ids[0].tolist() == [*sample.input_ids[:7], *[PAD] * 9]
    assert batch.position_ids[0].tolist() == [*range(7), *range(9)]
    assert (batch.labels, batch.tokens) == (6, 7)


def test_rows_without_a_label_give_zero_and_no_nan():
    model = llama()
    accept_pads(model)
    empty = Sample(np.arange(8), np.full(8, IGNORE), np.arange(8))
    for multiple in (1, 16):
        batch = make_batch([empty], multiple)
        assert (batch.labels, batch.tokens) == (0, 0)
        model.zero_grad()
        loss = loss_sum(model, *batch.tensors(CPU))
        loss.backward()
        assert loss.item() == 0
        assert all(item.grad is None or not item.grad.any() for item in model.parameters())


def test_the_pad_embedding_is_the_same_parameter_under_the_same_name():
    model = llama()
    before = {name: id(item) for name, item in model.named_parameters()}
    accept_pads(model)
    accept_pads(model)
    embedding = model.get_input_embeddings()
    assert type(embedding) is PadEmbedding
    assert {name: id(item) for name, item in model.named_parameters()} == before
    ids = torch.tensor([[3, PAD]])
    assert torch.equal(embedding(ids)[0, 0], embedding.weight[3]) and not embedding(ids)[0, 1].any()
