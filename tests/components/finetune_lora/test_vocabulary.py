"""Rows for new ids: there are enough of them, and they begin at the mean of the known ones."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from crosstrain.components.finetune_lora.vocabulary import make_room


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("rows", "after"), [(350, 353), (384, 384)], ids=["resized", "padded"])
def test_new_rows_begin_at_the_mean(save_model, tmp_path, tied, rows, after) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "m", tie_word_embeddings=tied, vocab_size=rows))
    before = [layer.weight.detach().clone() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    make_room(model, 350, 353)
    assert model.config.vocab_size == after
    for old, layer in zip(before, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True):
        assert layer.weight.shape[0] == after
        assert torch.equal(layer.weight[:350], old[:350])
        torch.testing.assert_close(layer.weight[350:353], old[:350].mean(0).expand(3, -1))
