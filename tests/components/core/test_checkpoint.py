"""Checkpoints: whole or absent, found again, loaded safely."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crosstrain.components.core.artifact import hash_file
from crosstrain.components.core.checkpoint import Checkpoints, run_key
from crosstrain.components.core.checkpoint_files import PLAN_NAME
from crosstrain.components.core.manifest import MANIFEST_NAME, Source
from crosstrain.components.core.reproducible import random_state, reproducible, seed_everything, set_random_state
from crosstrain.components.core.storage import TEMPORARY, open_store

KEY = run_key("train_fp8", {"steps": 5}, {"shards": Source(kind="shards", sha256="a" * 64)})


def checkpoints(uri: str, key: str = KEY, keep: int = 2) -> Checkpoints:
    return Checkpoints(uri, key, component="train_fp8", options={"steps": 5}, inputs={}, keep=keep)


def save(saved: Checkpoints, step: int, value: float = 1.0, **own: Any) -> None:
    saved.save(step, {"w": torch.full((3,), value)}, {"history": [{"loss": value}]}, own, train_loss=value)
    saved.finish()


def load(saved: Checkpoints, step: int) -> tuple[torch.Tensor, dict[str, Any], Any]:
    tensor = torch.zeros(3)
    notes, own = saved.load(step, {"w": tensor})
    return tensor, notes, own


def test_the_newest_is_found_and_the_oldest_go(store_uri):
    saved = checkpoints(store_uri)
    for step in (10, 20, 30):
        save(saved, step, float(step))
    again = checkpoints(store_uri)
    assert again.steps() == [20, 30]
    tensor, notes, _ = load(again, 30)
    assert torch.equal(tensor, torch.full((3,), 30.0))
    assert notes["history"] == [{"loss": 30.0}]


def test_a_save_holds_what_was_there_when_it_was_asked_for(tmp_path):
    saved, tensor = checkpoints(str(tmp_path)), torch.zeros(1_000_000)
    saved.save(1, {"w": tensor}, {}, {}, None)
    tensor.fill_(7.0)
    again = torch.ones(1_000_000)
    assert saved.steps() == [1]
    saved.load(1, {"w": again})
    assert not again.any()


def test_a_save_that_fails_in_the_background_is_an_error_of_the_next_call(tmp_path):
    saved = checkpoints(str(tmp_path))
    save(saved, 1)
    shutil.rmtree(tmp_path)
    (tmp_path).write_text("")
    with pytest.raises(OSError, match=r"Not a directory|cannot write|could not be stored"):
        save(saved, 2)


def test_another_run_sees_none_of_it(store_uri):
    save(checkpoints(store_uri), 10)
    other = run_key("train_fp8", {"steps": 6}, {})
    assert checkpoints(store_uri, other).steps() == []


def test_a_save_that_was_cut_short_is_never_chosen_and_cleared_away(store_uri):
    saved = checkpoints(store_uri)
    save(saved, 10)
    save(saved, 20)
    store = open_store(saved.uri)
    store.delete(f"step-00000020/{MANIFEST_NAME}")
    store.write("step-00000030/.crosstrain-staging-x/__0_0.distcp", b"half")
    assert saved.steps() == [10]
    saved.clear_torn()
    assert {entry.key.split("/")[0] for entry in store.list()} == {"step-00000010"}


def test_what_a_killed_writer_staged_on_disk_is_cleared_away(tmp_path):
    saved = checkpoints(str(tmp_path))
    save(saved, 10)
    torn = Path(saved.uri) / "step-00000020"
    (torn / f"{TEMPORARY}staging-x").mkdir(parents=True)
    (torn / f"{TEMPORARY}staging-x" / PLAN_NAME).write_bytes(b"half")
    (torn / f"{TEMPORARY}y").write_bytes(b"half a manifest")
    saved.clear_torn()
    assert not [path for path in torn.rglob("*") if path.name.startswith(TEMPORARY)]
    assert saved.steps() == [10]


@pytest.mark.parametrize("name", ["__0_0.distcp", PLAN_NAME])
def test_a_damaged_one_is_an_error(tmp_path, name):
    saved = checkpoints(str(tmp_path))
    save(saved, 10)
    path = Path(saved.uri) / "step-00000010" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="damaged"):
        load(saved, 10)


@pytest.mark.parametrize(
    ("tensors", "words"), [({"v": torch.zeros(3)}, "Missing key.*: v"), ({"w": torch.zeros(4)}, "Size mismatch.* w")]
)
def test_another_model_is_an_error(tmp_path, tensors, words):
    saved = checkpoints(str(tmp_path))
    save(saved, 10)
    with pytest.raises(ValueError, match=f"does not load.*{words}"):
        saved.load(10, tensors)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil",))


def evil_plan(folder: Path) -> None:
    """Put a pickle that runs code in the place of a checkpoint's plan, its hash in the manifest."""
    torch.save(Evil(), folder / PLAN_NAME)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    (entry,) = (file for file in manifest["files"] if file["path"] == PLAN_NAME)
    entry |= {"bytes": (folder / PLAN_NAME).stat().st_size, "sha256": hash_file(folder / PLAN_NAME)}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def test_loading_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = checkpoints(str(tmp_path / "state"))
    save(saved, 10, evil=Evil())
    with pytest.raises(ValueError, match="does not load"):
        load(saved, 10)
    evil_plan(Path(saved.uri) / "step-00000010")
    with pytest.raises(ValueError, match="does not load"):
        load(saved, 10)
    assert not (tmp_path / "evil").exists()
    assert pickle.dumps(Evil())  # it is a pickle that would have run


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="cannot write"):
        checkpoints(str(tmp_path / "file" / "state"))


def test_random_state_goes_through_a_checkpoint(tmp_path):
    seed_everything(3)
    saved = checkpoints(str(tmp_path))
    save(saved, 1, random=random_state())
    first = (torch.rand(4).tolist(), np.random.rand(4).tolist(), random.random())
    set_random_state(load(saved, 1)[2]["random"])
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
