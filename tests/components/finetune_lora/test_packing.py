"""Packed rows compute what the same rows compute alone, and nothing reaches over from one to the next."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from crosstrain.components.core.batch import loss_sum, make_batch
from crosstrain.components.core.data import IGNORE
from crosstrain.components.core.tokenizer import load_tokenizer
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.packing import PackedRows, pack
from crosstrain.components.finetune_lora.rows import RowDataset, read_rows


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_every_row_is_packed_once_and_fits(lengths: list[int]) -> None:
    packs = pack(lengths, 50)
    assert sorted(row for members in packs for row in members) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in members) for members in packs]
    assert max(sums) <= 50
    assert sum(total <= 25 for total in sums) <= 1  # two sequences at most half full would be one
    assert packs == pack(lengths, 50)


def test_best_fit() -> None:
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


@pytest.fixture
def rows(corpus, tokenizer_folder, pairs) -> RowDataset:
    config = Config(model="m", data="d", output="o")
    return read_rows(corpus(pairs), load_tokenizer(tokenizer_folder), config, 96)


def test_the_loss_and_its_gradient_are_those_of_the_rows_alone(rows, save_model, tmp_path) -> None:
    packed = PackedRows(rows, 96)
    assert len(packed) < len(rows) / 2
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "base"))
    found = []
    for samples in ([packed[i] for i in range(len(packed))], [rows[i] for i in range(len(rows))]):
        model.zero_grad()
        total, labels = 0.0, 0
        for sample in samples:
            batch = make_batch([sample])
            loss = loss_sum(model, *batch.tensors(torch.device("cpu")))
            loss.backward()
            total, labels = total + loss.item(), labels + batch.labels
        found.append((total, labels, [p.grad.clone() for p in model.parameters()]))
    assert found[0][1] == found[1][1]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_a_row_that_is_learned_from_its_first_id_is_not_asked_of_another_row() -> None:
    rows = RowDataset(np.arange(120, dtype=np.uint32), np.ones(120, np.bool_), [40, 50, 20, 10], dropped=0)
    packed = PackedRows(rows, 96)
    assert len(packed) == 2
    for sample in (packed[i] for i in range(len(packed))):
        assert (sample.labels[sample.position_ids == 0] == IGNORE).all()
        assert len(sample.input_ids) <= 96
        assert (np.flatnonzero(sample.position_ids == 0)[0], sample.continues) == (0, False)


def test_packing_trains_and_counts_rows(save_model, import_model, corpus, finetune, pairs, tmp_path) -> None:
    model = import_model(save_model(tmp_path / "base"))
    long = {"prompt": "long " * 60, "completion": "lost"}
    result = finetune(model, corpus([*pairs, long]), packing=True, sequence_length=64, global_batch_size=2, steps=20)
    assert (result.artifact.facts.rows, result.artifact.facts.rows_dropped) == (len(pairs), 1)
    log = [json.loads(line) for line in result.artifact.read("training_log.jsonl").splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]


def test_shards_are_not_packed_again(save_model, import_model, shards, finetune, tmp_path) -> None:
    model = import_model(save_model(tmp_path / "base"))
    data = shards(model)
    with pytest.raises(ValueError, match="packed already; leave out packing"):
        finetune(model, data, packing=True)
    with pytest.raises(ValueError, match="leave out new_tokens, or give rows"):
        finetune(model, data, new_tokens=("<x>",))
