"""Shards out of object storage: fetched ahead, verified, within a bound on disk, and the same samples as from disk."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.data import BatchPlan, ShardDataset
from crosstrain.components.core.manifest import ShardsFacts, Split, TokenizerFacts
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.tokens import PairWriter

LENGTH, SHARDS, SHARD_TOKENS = 16, 6, 160
NO_SPLIT = Split(shards=(), shard_tokens=(), continues=(), documents=0, tokens=0, samples=0)


def write_shards(uri: str) -> Artifact:
    stems = tuple(f"train-{number:05d}" for number in range(SHARDS))
    with ArtifactWriter(uri) as out:
        for number, stem in enumerate(stems):
            with PairWriter(out.staging / stem, np.dtype(np.uint16)) as writer:
                writer.write(np.arange(SHARD_TOKENS) + number * SHARD_TOKENS, np.full(10, SHARD_TOKENS // 10))
            for suffix in (".bin", ".idx"):
                out.add(out.staging / (stem + suffix), stem + suffix)
        split = Split(
            shards=stems, shard_tokens=(SHARD_TOKENS,) * SHARDS, continues=(False,) * SHARDS, documents=10 * SHARDS,
            tokens=SHARDS * SHARD_TOKENS, samples=SHARDS * SHARD_TOKENS // LENGTH,
        )  # fmt: skip
        tokenizer = TokenizerFacts(sha256="0" * 64, vocab_size=2000, bos_id=None, eos_id=9)
        facts = ShardsFacts(
            tokenizer=tokenizer, dtype="uint16", sequence_length=LENGTH, train=split, validation=NO_SPLIT
        )
        return out.commit("shard", facts, {}, {})


def on_disk(artifact: Artifact) -> int:
    return sum(path.stat().st_size for path in artifact._folder().rglob("train-*") if path.is_file())


def shard_bytes(artifact: Artifact) -> int:
    return sum(artifact.manifest.file(f"train-00000{suffix}").bytes for suffix in (".bin", ".idx"))


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if "_fetch_ahead" in thread.name:
            thread.join(20)


@pytest.fixture
def shards(s3_uri: str) -> Artifact:
    return write_shards(s3_uri)


def test_any_bound_gives_the_samples_that_disk_gives_within_the_bound(shards: Artifact, tmp_path: Path) -> None:
    local = ShardDataset(write_shards(str(tmp_path)), "train")
    for held in (1, 2, SHARDS):
        again = Artifact.open(shards.uri)
        limit = held * shard_bytes(again)
        data = ShardDataset(again, "train", cache_bytes=limit)
        for index in np.random.default_rng(0).permutation(len(data)).tolist():
            assert data[index].input_ids.tolist() == local[index].input_ids.tolist()
            assert on_disk(again) <= limit


def test_shards_are_fetched_ahead_as_far_as_there_is_room(shards: Artifact) -> None:
    for held, here in ((0, SHARDS), (3, 3)):
        again = Artifact.open(shards.uri)
        data = ShardDataset(again, "train", cache_bytes=held * shard_bytes(again))
        data[0]
        wait_for_threads()
        assert on_disk(again) == here * shard_bytes(again)


def test_a_damaged_shard_is_refused_when_it_is_needed(shards: Artifact) -> None:
    store = open_store(shards.uri)
    data = store.read("train-00003.bin")
    store.write("train-00003.bin", bytes([data[0] ^ 1]) + data[1:])
    damaged = ShardDataset(Artifact.open(shards.uri), "train")
    assert damaged[0].input_ids[1] == 1
    with pytest.raises(ValueError, match=r"train-00003.bin.*damaged"):
        damaged[3 * SHARD_TOKENS // LENGTH]


def test_a_cache_that_holds_no_shard_is_refused(shards: Artifact) -> None:
    with pytest.raises(ValueError, match="largest shard"):
        ShardDataset(shards, "train", cache_bytes=10)


def test_a_forked_reader_reads_on(shards: Artifact) -> None:
    data = ShardDataset(Artifact.open(shards.uri), "train")
    expected = data[5].input_ids.tolist()
    wait_for_threads()
    child = os.fork()
    if not child:
        os._exit(0 if data[5].input_ids.tolist() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_rank_of_any_world_reads_its_part_of_one_global_order(shards: Artifact) -> None:
    data = ShardDataset(Artifact.open(shards.uri), "train", cache_bytes=2 * shard_bytes(shards))
    orders = []
    for world in (1, 2, 3, 6):
        plans = [BatchPlan(len(data), 6, seed=3, rank=rank, world=world) for rank in range(world)]
        order = np.empty((10, 6), np.int64)
        for rank, plan in enumerate(plans):
            for step in range(10):
                order[step, rank::world] = [data[i].input_ids[0] // LENGTH for i in plan.indices(step).tolist()]
        orders.append(order.ravel().tolist())
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(60))


def test_training_takes_the_bound_which_is_no_part_of_the_work(shards: Artifact, tmp_path: Path) -> None:
    values = {"shards": shards.uri, "output": str(tmp_path / "model"), "preset": "tiny", "precision": "bf16"}
    config = load_config("train_fp8").decode({**values, "cache_bytes": 10})
    assert config.options() == load_config("train_fp8").decode(values).options()
    with pytest.raises(ValueError, match="a cache of 10 bytes does not hold its largest shard"):
        execute("train_fp8", config)
