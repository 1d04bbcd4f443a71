"""Losses by document against a model that sees each document's piece alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from crosstrain.components.core.data import IGNORE, ShardDataset
from crosstrain.components.core.model import load_model
from crosstrain.components.core.unigram import count_labels, unigram_loss
from crosstrain.components.evaluate.generations import choose_prompts, continue_prompts
from crosstrain.components.evaluate.losses import HeldOut, group, score, token_bytes


@pytest.fixture
def held_out(make_shards):
    return HeldOut(ShardDataset(make_shards("shards"), "validation"))


@pytest.fixture
def model(make_shards, make_model):
    return load_model(make_model("model", make_shards("for_model")))


def alone(model, ids):
    """Summed loss and hits of a piece that nothing stands before."""
    with torch.inference_mode():
        logits = model(torch.tensor(ids)[None]).logits[0, :-1]
    wanted = torch.tensor(ids[1:])
    loss = functional.cross_entropy(logits, wanted, reduction="sum")
    return float(loss), int((logits.argmax(-1) == wanted).sum())


def test_every_document_is_scored_as_if_it_stood_alone_and_cut_ones_are_summed(held_out, model):
    """Isolation and aggregation together: pieces by hand from the documents, without the reader's positions."""
    found = score(model, held_out, batch_tokens=96, name="model")
    length = held_out.samples.sequence_length
    pair_ids, starts = held_out.samples._open(0)
    ends = [*starts[1:], len(pair_ids)]
    expected = {}
    cut = 0
    for document, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        borders = [begin, *range((begin // length + 1) * length, end, length), end]
        cut += len(borders) > 2
        parts = [pair_ids[a:b].astype(np.int64) for a, b in pairwise(borders)]
        sums = [(part.size - 1, *alone(model, part)) for part in parts if part.size > 1]
        if sums:
            expected[document] = np.sum(sums, axis=0)
    documents, tokens, loss, hits = group(found.document, found.tokens, found.loss, found.hits)
    assert cut > 5
    assert documents.tolist() == list(expected)
    wanted = np.array(list(expected.values()))
    assert tokens.tolist() == wanted[:, 0].tolist()
    np.testing.assert_allclose(loss, wanted[:, 1], rtol=1e-5)
    np.testing.assert_array_equal(hits, wanted[:, 2])


def test_batches_change_nothing(held_out, model):
    one, many = (score(model, held_out, tokens, "model") for tokens in (1, 10_000))
    np.testing.assert_array_equal(one.document, many.document)
    np.testing.assert_allclose(one.loss, many.loss, rtol=1e-5)


def test_bounds_take_the_start_of_the_split(held_out, model):
    everything = score(model, held_out, 256, "model")
    few = score(model, HeldOut(held_out.samples, max_documents=7), 256, "model")
    kept = everything.document < 7
    np.testing.assert_array_equal(few.tokens, everything.tokens[kept])
    np.testing.assert_allclose(few.loss, everything.loss[kept], rtol=1e-5)
    two = score(model, HeldOut(held_out.samples, max_samples=2), 256, "model")
    assert set(two.sample) == {0, 1}


def test_a_model_whose_losses_are_no_numbers_is_refused(held_out, model):
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="the candidate model at X: its loss is not a finite number in document 0"):
        score(model, held_out, 256, "the candidate model at X")


def test_the_unigram_model_is_the_smoothed_frequency_of_the_training_split(make_shards):
    shards = make_shards("shards")
    train, held = ShardDataset(shards, "train"), HeldOut(ShardDataset(shards, "validation"))
    vocabulary = shards.facts.tokenizer.vocab_size
    wanted = count_labels((sample for _, sample, _ in held), vocabulary)
    labels = np.concatenate([train[i].labels for i in range(len(train))])
    seen = np.bincount(labels[labels != IGNORE], minlength=vocabulary)
    probability = (seen + 1) / (seen.sum() + vocabulary)
    expected = -(wanted / wanted.sum() * np.log(probability)).sum()
    assert unigram_loss(train, wanted, 10**9) == pytest.approx(expected)
    assert unigram_loss(train, wanted, 10) != pytest.approx(expected)
    uniform = unigram_loss(train, seen * 0 + 1, 10**9)
    assert uniform > np.log(vocabulary)


def test_bytes_of_tokens_are_those_of_the_text(tokenizer):
    text = "dög 語 é & the <b>end</b>"
    ids = tokenizer.encode_batch([text])[0]
    lengths = token_bytes(tokenizer)
    assert lengths[ids].sum() == len(text.encode())
    assert lengths[tokenizer.eos_id] == 0


def test_prompts_are_beginnings_of_documents_and_greedy_text_ends_at_eos(held_out, model, tokenizer):
    prompts = choose_prompts(held_out, 3, 8, 12, tokenizer.eos_id)
    _, starts = held_out.samples._open(0)
    ids = held_out.samples._open(0)[0]
    assert len(prompts) == 3
    for prompt in prompts:
        begin = starts[prompt.document]
        np.testing.assert_array_equal(prompt.ids, ids[begin : begin + 8])
        assert tokenizer.eos_id not in prompt.truth and prompt.truth.size <= 12
    written = continue_prompts(model, prompts, 12, tokenizer.eos_id)
    with torch.inference_mode():
        first = model(torch.tensor(prompts[0].ids)[None]).logits[0, -1].argmax()
    assert written[0][0] == int(first)
    assert continue_prompts(model, prompts[:1], 12, eos_id=int(first))[0].size == 0
    assert choose_prompts(held_out, 0, 8, 12, tokenizer.eos_id) == []
