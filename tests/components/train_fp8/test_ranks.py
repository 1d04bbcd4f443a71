"""train_fp8 in several processes, and what it makes of their end: killed in a step, in a save, asked to stop."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from crosstrain.components.core.artifact import Artifact

RANK = Path(__file__).with_name("drilled_rank.py")
OPTIONS: dict[str, Any] = {
    "preset": "debug", "steps": 18, "global_batch_size": 8, "micro_batch_size": 4, "warmup_steps": 4,
    "learning_rate": 3e-3, "checkpoint_every": 6, "evaluate_every": 9, "threads": 1, "log_every": 1,
    "precision": "fp32",
}  # fmt: skip
SECONDS = 400

Torchrun = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def torchrun(shards: str) -> Torchrun:
    """Train on two ranks, restarted as often as faults want; exit status and output."""

    def run(output: Path, faults: str = "none", restarts: int = 0, **options: Any) -> tuple[int, str]:
        output.parent.mkdir(exist_ok=True)
        values = {**OPTIONS, "shards": shards, "output": output, **options}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1",
            str(RANK), str(output.parent), faults,
            *(f"--{name.replace('_', '-')}={value}" for name, value in values.items()),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def reference(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("reference")
    code, output = torchrun(folder / "model")
    assert code == 0, output
    return folder


def batches(folder: Path, rank: int) -> dict[int, list[tuple[int, list[int]]]]:
    """What a rank read: start of the ranks to (step, samples)."""
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines():
        start, step, samples = json.loads(line)
        found.setdefault(start, []).append((step, samples))
    return found


@pytest.mark.slow
def test_one_rank_writes_a_plain_model_with_its_log(reference):
    model = Artifact.open(str(reference / "model"))
    folder = model.fetch_all()
    assert LlamaForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert len(model.read("training_log.jsonl").splitlines()) == 18
    assert model.facts.train_loss < 4
    record = json.loads((reference / "model" / "run.json").read_text())
    assert record["metrics"]["tokens_seen"] == model.facts.tokens_seen
    parts = [set(samples) for rank in (0, 1) for step, samples in batches(reference, rank)[0] if step == 0]
    assert len(parts) == 2 and not parts[0] & parts[1] and len(parts[0] | parts[1]) == 8


@pytest.mark.slow
def test_ranks_that_are_stopped_and_killed_end_where_undisturbed_ones_do(torchrun, reference, tmp_path):
    """SIGTERM on one rank, then SIGKILL in a step, then SIGKILL in a save: same order, losses, weights, manifest."""
    code, output = torchrun(tmp_path / "drill" / "model", "term,step,save", restarts=3)
    assert code == 0, output
    model, wanted = (Artifact.open(str(folder / "model")) for folder in (tmp_path / "drill", reference))
    assert model.read("training_log.jsonl") == wanted.read("training_log.jsonl")
    assert model.read("model.safetensors") == wanted.read("model.safetensors")
    assert model.manifest.sha256 == wanted.manifest.sha256
    resumed = [int(step) for step in re.findall(r"resuming at step (\d+)", output)]
    assert resumed == [5, 5, 6, 6, 6, 6], "SIGTERM saved at once; the checkpoint torn at step 12 was not chosen"
    assert re.search(r"step-00000012: a save was cut short here", output)
    assert output.count("stopped by SIGTERM after step 5 of 18") >= 2
    for rank in (0, 1):
        starts, whole = batches(tmp_path / "drill", rank), dict(batches(reference, rank)[0])
        assert [starts[start][0][0] for start in range(4)] == [0, 5, 6, 6]
        assert all(whole[step] == samples for read in starts.values() for step, samples in read)
    assert not list((tmp_path / "drill").rglob(".crosstrain-*")), "what the kills left is cleared away"
