"""Checkpoints: whole or absent, found again, loaded safely."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crosstrain.components.core.checkpoint import STATE_NAME, Checkpoints, run_key
from crosstrain.components.core.manifest import MANIFEST_NAME, Source
from crosstrain.components.core.reproducible import random_state, reproducible, seed_everything, set_random_state
from crosstrain.components.core.storage import TEMPORARY, open_store

KEY = run_key("train_fp8", {"steps": 5}, {"shards": Source(kind="shards", sha256="a" * 64)})


def checkpoints(uri: str, key: str = KEY, keep: int = 2) -> Checkpoints:
    return Checkpoints(uri, key, component="train_fp8", options={"steps": 5}, inputs={}, keep=keep)


def state(value: float) -> dict[str, Any]:
    return {"parameters": {"w": torch.full((3,), value)}, "progress": {"step": 1, "history": [{"loss": value}]}}


def test_the_newest_is_found_and_the_oldest_go(store_uri):
    saved = checkpoints(store_uri)
    for step in (10, 20, 30):
        saved.save(step, state(float(step)), train_loss=1.0)
    again = checkpoints(store_uri)
    assert again.steps() == [20, 30]
    loaded = again.load(30)
    assert torch.equal(loaded["parameters"]["w"], torch.full((3,), 30.0))
    assert loaded["progress"]["history"] == [{"loss": 30.0}]


def test_another_run_sees_none_of_it(store_uri):
    checkpoints(store_uri).save(10, state(1.0), None)
    other = run_key("train_fp8", {"steps": 6}, {})
    assert checkpoints(store_uri, other).steps() == []


def test_a_save_that_was_cut_short_is_never_chosen_and_cleared_away(store_uri):
    saved = checkpoints(store_uri)
    saved.save(10, state(1.0), None)
    saved.save(20, state(2.0), None)
    store = open_store(saved.uri)
    store.delete(f"step-00000020/{MANIFEST_NAME}")
    store.write("step-00000030/.crosstrain-staging-x/state.pt", b"half")
    assert saved.steps() == [10]
    saved.clear_torn()
    assert {entry.key.split("/")[0] for entry in store.list()} == {"step-00000010"}


def test_what_a_killed_writer_staged_on_disk_is_cleared_away(tmp_path):
    saved = checkpoints(str(tmp_path))
    saved.save(10, state(1.0), None)
    torn = Path(saved.uri) / "step-00000020"
    (torn / f"{TEMPORARY}staging-x").mkdir(parents=True)
    (torn / f"{TEMPORARY}staging-x" / STATE_NAME).write_bytes(b"half")
    (torn / f"{TEMPORARY}y").write_bytes(b"half a manifest")
    saved.clear_torn()
    assert not [path for path in torn.rglob("*") if path.name.startswith(TEMPORARY)]
    assert saved.steps() == [10]


def test_a_damaged_one_is_an_error(tmp_path):
    saved = checkpoints(str(tmp_path))
    saved.save(10, state(1.0), None)
    path = Path(saved.uri) / "step-00000010" / STATE_NAME
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="damaged"):
        saved.load(10)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil",))


def test_loading_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = checkpoints(str(tmp_path / "state"))
    saved.save(10, {"evil": Evil()}, None)
    with pytest.raises(ValueError, match="does not load"):
        saved.load(10)
    assert not (tmp_path / "evil").exists()
    assert pickle.dumps(Evil())  # it is a pickle that would have run


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="cannot write"):
        checkpoints(str(tmp_path / "file" / "state"))


def test_random_state_goes_through_a_checkpoint(tmp_path):
    seed_everything(3)
    saved = checkpoints(str(tmp_path))
    saved.save(1, {"random": random_state()}, None)
    first = (torch.rand(4).tolist(), np.random.rand(4).tolist(), random.random())
    set_random_state(saved.load(1)["random"])
    assert (torch.rand(4).tolist(), np.random.rand(4).tolist(), random.random()) == first


@pytest.mark.parametrize("part", ["torch", "numpy", "python", "cuda"])
def test_random_state_that_does_not_fit_is_an_error(part):
    broken = random_state()
    broken[part] = {"torch": torch.zeros(3, dtype=torch.uint8), "cuda": [1]}.get(part, ["x"])
    with pytest.raises(ValueError, match="random state does not load"):
        set_random_state(broken)
    del broken[part]
    with pytest.raises(ValueError, match="random state does not load"):
        set_random_state(broken)


def test_reproducible_puts_torch_back():
    threads, mode = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with reproducible(1):
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, mode)
