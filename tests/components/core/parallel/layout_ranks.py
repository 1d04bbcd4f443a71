"""A rank that trains one small Llama after another, each in a layout of its own, in one process group.

Arguments: a JSON file with a list of runs, each {layout, tied, precision, recipe, samples, fault, state, result,
options}; history and weights go where `result` says. A fault makes the loss over one labelled sample of global batch 6
not a number: `once`, the first time that it is read, or `always`. Started by the tests of this folder, as a process for
each rank; also imported there by path, for the run in one process.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core.checkpoint import Checkpoints
from crosstrain.components.core.data import IGNORE, BatchPlan, Sample
from crosstrain.components.core.parallel import engine
from crosstrain.components.core.parallel.layout import Work, check_layout
from crosstrain.components.core.parallel.options import DataParallelOptions, ModelParallelOptions
from crosstrain.components.core.parallel.world import World, join
from crosstrain.components.core.precision import choose
from crosstrain.components.core.training import train
from crosstrain.components.core.training_config import TrainingOptions

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "steps": 20, "global_batch_size": 8, "micro_batch_size": 4, "warmup_steps": 3, "learning_rate": 3e-3,
    "evaluate_every": 0, "evaluate_batches": 0, "checkpoint_every": 10, "keep_checkpoints": 9, "threads": 1,
    "on_divergence": "stop",
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def walk(index: int, length: int = 24) -> Sample:
    """Two documents; another number of labels in each sample, none at all in every ninth."""
    ids = np.cumsum(np.random.default_rng(index).integers(1, 4, length)) % 64
    labels = np.where(np.arange(length) % 12 == 0, IGNORE, ids)
    labels[: length if index % 9 == 8 else index % 7 * 3] = IGNORE
    return Sample(ids, labels, np.arange(length) % 12)


SAMPLES = [walk(index) for index in range(30)]
VALIDATION = [walk(index) for index in range(100, 105)]


def run(world: World, spec: dict[str, Any]) -> None:
    """Train as `spec` says; rank 0 writes the history and the weights."""
    torch.manual_seed(0)
    shape = {**SHAPE, **spec.get("shape", {})}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=spec["tied"]))
    options = TrainingOptions.decode({**OPTIONS, **spec.get("options", {})})
    degrees = spec["layout"]
    data = {name: value for name, value in degrees.items() if name.startswith("data")}
    rest = {name: value for name, value in degrees.items() if not name.startswith("data")}
    work = Work(options.global_batch_size, options.micro_batch_size, rest.get("pipeline_schedule", "1f1b"))
    layout = check_layout(shape, world.size, work, DataParallelOptions.decode(data), ModelParallelOptions.decode(rest))
    checkpoints = Checkpoints(spec["state"], "0" * 64, "train_fp8", {}, {}, keep=options.keep_checkpoints, world=world)
    samples = [walk(index) for index in range(spec.get("samples", len(SAMPLES)))]
    precision = choose(
        spec.get("precision", "fp32"), CPU, recipe=spec.get("recipe", "tensorwise"), minimum_features=16, amax_history=4
    )
    with poisoned(samples, options, spec.get("fault", "")):
        outcome = train(
            model, samples, options, precision, checkpoints,
            validation=VALIDATION, world=world, layout=layout, device=CPU,
        )  # fmt: skip
    scales = world.gather({name: item.tolist() for name, item in precision.state().items() if ".scale_" in name})
    events = world.gather(list(outcome.guard_events))
    weights = {name: item for name, item in outcome.weights() if item is not None}
    if world.first:
        save_file({name: item.contiguous() for name, item in weights.items()}, spec["result"] + ".safetensors")
        found = {
            "history": outcome.history, "resumed_from": outcome.resumed_from, "stalls": outcome.stalls,
            "scales": scales, "events": events,
        }  # fmt: skip
        Path(spec["result"]).write_text(json.dumps(found))


@contextmanager
def poisoned(samples: list[Sample], options: TrainingOptions, fault: str) -> Iterator[None]:
    """Have one sample's loss be NaN while the context lasts, on the rank that reads it."""
    if not fault:
        yield
        return
    batch = BatchPlan(len(samples), options.global_batch_size, options.seed).indices(6)
    bad = next(samples[int(index)] for index in batch if index % 9 != 8)
    ids = torch.from_numpy(bad.input_ids)
    real, seen = engine.loss_sum, [0]

    def loss_sum(model: Any, input_ids: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        is_bad = any(torch.equal(row[: len(ids)], ids) for row in input_ids)
        seen[0] += is_bad
        strikes = is_bad and (fault == "always" or seen[0] == 1)
        return real(model, input_ids, *args) * (float("nan") if strikes else 1.0)

    engine.loss_sum = loss_sum
    try:
        yield
    finally:
        engine.loss_sum = real


def main() -> None:
    """Join, and do all the runs of the file."""
    with join(CPU) as world:
        for spec in json.loads(Path(sys.argv[1]).read_text()):
            run(world, spec)


if __name__ == "__main__":
    main()
