"""The reader that training sees: samples, labels and positions, and an order that any number of ranks shares."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.data import IGNORE, BatchPlan, ShardDataset, collate, epoch_order
from crosstrain.components.core.manifest import ShardsFacts, Split, TokenizerFacts
from crosstrain.components.core.tokens import PairWriter

EOS = 9
NO_SPLIT = Split(shards=(), shard_tokens=(), continues=(), documents=0, tokens=0, samples=0)

ORDER_10 = [3, 9, 1, 5, 6, 4, 8, 7, 2, 0]
ORDER_LARGE = [279658465, 125758559, 861892337]


def make_shards(folder: Path, documents: list[list[int]], length: int, shard_tokens: int) -> Artifact:
    """A shards artifact of these documents in this order, written without the shard component."""
    stream = [i for ids in documents for i in ids]
    starts = np.cumsum([0, *(len(ids) for ids in documents)])
    stems, sizes, continues = [], [], []
    with ArtifactWriter(str(folder)) as out:
        for begin in range(0, len(stream), shard_tokens):
            end = min(begin + shard_tokens, len(stream))
            cuts = [begin, *(s for s in starts.tolist() if begin < s < end), end]
            stem = f"train-{len(stems):05d}"
            with PairWriter(out.staging / stem, np.dtype(np.uint16)) as writer:
                writer.write(np.array(stream[begin:end]), np.diff(cuts))
            for suffix in (".bin", ".idx"):
                out.add(out.staging / (stem + suffix), stem + suffix)
            stems.append(stem)
            sizes.append(end - begin)
            continues.append(begin not in starts)
        split = Split(
            shards=tuple(stems), shard_tokens=tuple(sizes), continues=tuple(continues), documents=len(documents),
            tokens=len(stream), samples=-(-len(stream) // length),
        )  # fmt: skip
        tokenizer = TokenizerFacts(sha256="0" * 64, vocab_size=100, bos_id=None, eos_id=EOS)
        facts = ShardsFacts(
            tokenizer=tokenizer, dtype="uint16", sequence_length=length, train=split, validation=NO_SPLIT
        )
        return out.commit("shard", facts, {}, {})


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=12),
    length=st.integers(2, 20),
    shard_tokens=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_samples_are_the_stream_cut_at_equal_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, shard_tokens: int
) -> None:
    documents = [[10 + number % 90] * (size - 1) + [EOS] for number, size in enumerate(lengths)]
    data = ShardDataset(make_shards(tmp_path_factory.mktemp("s"), documents, length, shard_tokens), "train")
    # One tuple an id of the stream: the id, and its place in its document.
    stream = [(i, place) for ids in documents for place, i in enumerate(ids)]
    assert len(data) == -(-len(stream) // length)
    for number, sample in enumerate(data[i] for i in range(len(data))):
        piece = stream[number * length : (number + 1) * length]
        pads = length - len(piece)
        assert sample.input_ids.tolist() == [i for i, _ in piece] + [EOS] * pads
        assert sample.continues == (piece[0][1] > 0)
        positions: list[int] = []
        for _, place in piece:
            positions.append(0 if place == 0 or not positions else positions[-1] + 1)
        assert sample.position_ids.tolist() == positions + list(range(pads))
        expected = [i if position else IGNORE for (i, _), position in zip(piece, positions, strict=True)]
        assert sample.labels.tolist() == expected + [IGNORE] * pads
    order = [*range(len(data)), *range(len(data) - 1, -1, -1)]
    batch, collated = data.batch(order), collate([data[i] for i in order])
    assert all(np.array_equal(batch[name], collated[name]) for name in collated)


def test_a_pad_that_is_eos_leaves_the_last_eos_its_label(tmp_path: Path) -> None:
    sample = ShardDataset(make_shards(tmp_path, [[1, 2, EOS]], 6, 100), "train")[0]
    assert sample.input_ids.tolist() == [1, 2, EOS, EOS, EOS, EOS]
    assert sample.labels.tolist() == [IGNORE, 2, EOS, IGNORE, IGNORE, IGNORE]
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_flipped_byte_is_an_error(tmp_path: Path) -> None:
    artifact = make_shards(tmp_path, [[1, 2, 3, EOS]], 4, 100)
    data = bytearray((tmp_path / "train-00000.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "train-00000.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00000\.bin.*damaged"):
        ShardDataset(artifact, "train")[0]


def test_only_shards_have_samples(tmp_path: Path) -> None:
    data = ShardDataset(make_shards(tmp_path, [[1, EOS]], 2, 100), "validation")
    assert len(data) == 0
    with pytest.raises(IndexError):
        data[0]


def test_collate_stacks(tmp_path: Path) -> None:
    data = ShardDataset(make_shards(tmp_path, [[1, 2, 3, EOS]], 2, 100), "train")
    batch = collate([data[1], data[0]])
    assert batch["input_ids"].tolist() == [[3, EOS], [1, 2]]
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        name: ((2, 2), "int64") for name in ("input_ids", "labels", "position_ids")
    }


@given(samples=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_an_epoch_has_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_order(samples, seed, epoch)(np.arange(samples))), np.arange(samples))


def test_the_order_never_changes() -> None:
    """Resuming an old run needs the order it began with: these values are for good."""
    assert epoch_order(10, 0, 0)(np.arange(10)).tolist() == ORDER_10
    assert epoch_order(1_000_000_007, 42, 3)(np.array([0, 1, 999_999_999])).tolist() == ORDER_LARGE


def test_orders_look_random() -> None:
    samples = 4096
    orders = [epoch_order(samples, seed, epoch)(np.arange(samples)) for seed in range(3) for epoch in range(3)]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(order, np.arange(samples))[0, 1]) < 0.06
        assert (np.abs(np.diff(order)) == 1).mean() < 0.005
        assert all((order == other).mean() < 0.01 for other in orders[:number])


@given(
    samples=st.integers(8, 200),
    world=st.sampled_from([1, 2, 3, 4, 8]),
    per_rank=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_ranks_together_see_every_sample_once_an_epoch_in_the_same_order(
    samples: int, world: int, per_rank: int, seed: int
) -> None:
    batch = world * per_rank
    steps = -(-2 * samples // batch)
    alone = np.concatenate([BatchPlan(samples, batch, seed).indices(step) for step in range(steps)])
    for epoch in range(2):
        assert sorted(alone[epoch * samples : (epoch + 1) * samples].tolist()) == list(range(samples))
    ranks = [BatchPlan(samples, batch, seed, rank, world) for rank in range(world)]
    together = [np.stack([plan.indices(step) for plan in ranks], axis=1).ravel() for step in range(steps)]
    assert np.array_equal(np.concatenate(together), alone)


def test_a_plan_follows_the_order_of_each_epoch_wherever_a_batch_lies() -> None:
    samples, batch = 9_000, 500
    expected = np.concatenate([epoch_order(samples, 3, epoch)(np.arange(samples)) for epoch in range(2)])
    plan = BatchPlan(samples, batch, seed=3)
    for step in (35, 0, 8, 17, 9, 16, 18):
        assert np.array_equal(plan.indices(step), expected[step * batch : (step + 1) * batch])
    part = BatchPlan(samples, batch, seed=3, rank=1, world=4).indices(8)
    part[:] = 0
    assert np.array_equal(plan.indices(8), expected[4000:4500])


@pytest.mark.parametrize(
    ("samples", "batch", "world", "message"),
    [(3, 4, 4, "3 samples for 4 ranks"), (100, 6, 4, "does not divide over 4 ranks"), (100, 0, 1, "does not divide")],
)
def test_impossible_batches_are_refused(samples: int, batch: int, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchPlan(samples, batch, seed=0, world=world)


@pytest.mark.slow
def test_positions_alone_keep_documents_apart_in_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    documents = [[1, 2, 3, EOS], [4, EOS], [5, 6, 7, 8, EOS]]
    batch = collate([ShardDataset(make_shards(tmp_path, documents, 16, 100), "train")[0]])
    with torch.no_grad():
        ids, positions = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["position_ids"])
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([d]), use_cache=False).logits[0] for d in documents])
        mixed = model(input_ids=ids, use_cache=False).logits[0]
    assert torch.allclose(packed[:11], alone, atol=1e-4)
    assert not torch.allclose(mixed[:11], alone, atol=1e-2)
