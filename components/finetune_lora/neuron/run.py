"""Fine-tuning through optimum-neuron as one step: checks, compiling, training in a job's ranks, consolidating.

The step's own process has no accelerator. It refuses what cannot work, launches a job that finds and compiles the
graphs (once for a request, where compiled graphs are kept), launches the job that trains, and, when that has ended and
its NeuronCores are free, puts the shards that the ranks left in the store together as the adapter. The ranks are this
same module under torchrun. Left out on purpose: what the ranks do with the library (backend).
"""

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.components import images
from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.data import BatchPlan
from crosstrain.components.core.launch.job import Job, RunOn
from crosstrain.components.core.launch.launcher import launch
from crosstrain.components.core.launch.own_job import own_job
from crosstrain.components.core.launch.plan import processes_per_node
from crosstrain.components.core.launch.run_job import run_as_job
from crosstrain.components.core.manifest import CheckpointFacts, File, Source
from crosstrain.components.core.model import LOG_NAME
from crosstrain.components.core.neuron.adapter_folder import write_adapter
from crosstrain.components.core.neuron.checkpoint import find_checkpoint
from crosstrain.components.core.neuron.compile_cache import front
from crosstrain.components.core.run_key import run_key
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import LocalStore, open_store
from crosstrain.components.core.telemetry import peak_rss_bytes
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.material import ROW_LENGTH, Material, read_material
from crosstrain.components.finetune_lora.neuron import backend
from crosstrain.components.finetune_lora.neuron.preflight import (
    Layout,
    check_model,
    check_options,
    choose_targets,
    plan_layout,
)
from crosstrain.components.finetune_lora.neuron.samples import Ordered
from crosstrain.components.finetune_lora.packing import PackedRows
from crosstrain.components.finetune_lora.rows import RowDataset

log = logging.getLogger(__name__)

COMPONENT = "finetune_lora"
SHARDS_SUFFIX = ".shards"
"""Without a state prefix, the ranks' checkpoints lie at the output's URI with this behind it."""
TRIAL = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set to 1 by neuron_parallel_compile for the run in which graphs are only looked for."""

_NOT_IN_GRAPHS = ("seed", "base_name", "prompt_field", "completion_field", "messages_field", "keep_checkpoints")


@dataclass(frozen=True)
class Request:
    """A request that has passed every check."""

    base: Artifact
    data: Artifact
    layout: Layout
    targets: list[str]

    def inputs(self) -> dict[str, Source]:
        """What the work is made from."""
        return {"model": self.base.manifest.source(), "data": self.data.manifest.source()}


def check(config: Config, processes: int) -> Request:
    """Check all that can be known before anything is compiled.

    Raises:
        ValueError, FileNotFoundError: with the reason, and what to do instead.
    """
    base, data = Artifact.open(config.model, "model"), Artifact.open(config.data)
    check_options(config, data.manifest.kind)
    layout = plan_layout(config, processes)
    fused = check_model(json.loads(base.read("config.json")), layout, config.neuron.fuse_qkv)
    return Request(base, data, layout, choose_targets(config, fused))


def run(config: Config) -> Result:
    """Fine-tune through optimum-neuron.

    Raises:
        ValueError, FileNotFoundError, PermissionError: the request cannot work, or the adapter is not what was asked
            for.
        JobFailed: compiling or training did not succeed.
    """
    config = config.model_copy(update={"backend": "optimum_neuron"})
    if "WORLD_SIZE" in os.environ:
        return _rank(config)
    request = check(config, config.run_on.nodes * _processes(config))
    shards = _shards_uri(config, request)
    log.warning("optimum-neuron cannot resume: killed, it begins anew; consolidate takes what it saved at %s", shards)
    ranks = config.model_copy(update={"output": shards})
    job = own_job(COMPONENT, ranks, images.NEURON, config.steps)
    assert job is not None, "there are several processes, or they run elsewhere"
    open_store(config.output).check_writable()
    compiling = _compile(config, request, job)
    before = front(config.compile_cache, False, _python(config.run_on)) if config.compile_cache else ()
    trained = run_as_job(COMPONENT, ranks, images.NEURON, config.steps, front=before)
    assert trained is not None, "there is a job"
    made = _consolidate(config, request, trained.artifact)
    metrics = {**trained.metrics, **compiling, "peak_rss_bytes": peak_rss_bytes()}
    return Result(made, metrics, job=trained.job)


def _processes(config: Config) -> int:
    """Processes a node.

    Raises:
        ValueError: there is one, in this process, which cannot be a rank.
    """
    job = own_job(COMPONENT, config, images.NEURON)
    if job is None:
        raise ValueError(
            "backend optimum_neuron trains in several processes: set run_on.instance_type, or "
            "run_on.processes_per_node to the NeuronCores of this machine"
        )
    return processes_per_node(job)


def _shards_uri(config: Config, request: Request) -> str:
    """Where the ranks leave their checkpoints: under the state prefix by the run's key, or beside the output."""
    if not config.state:
        return config.output.rstrip("/") + SHARDS_SUFFIX
    return f"{config.state.rstrip('/')}/{run_key(COMPONENT, config.options(), request.inputs())}"


def _python(run_on: RunOn) -> str:
    return sys.executable if run_on.target == "local" else "python3"


def _compile(config: Config, request: Request, job: Job) -> dict[str, float]:
    """Have the graphs compiled in a job of the same shape, unless that was done for this request; how long it took."""
    if not config.compile_cache:
        log.warning("no compile_cache: training itself compiles each graph that it meets, on every start")
        return {}
    options = {name: value for name, value in config.options().items() if name not in _NOT_IN_GRAPHS}
    image = job.run_on.image or job.image
    key = run_key(COMPONENT, {**options, "layout": vars(request.layout), "image": image}, request.inputs())
    store, mark = open_store(config.compile_cache), f"requests/{key}.json"
    if store.exists(mark):
        log.info("%s: the graphs of this request are compiled already", store.uri)
        return {}
    started = time.perf_counter()
    limits = job.run_on.timeouts
    silent = limits.model_copy(update={"first_step": limits.run, "step": limits.run})  # a compiler reports no steps
    trial = job.model_copy(
        update={
            "run": f"{job.run}\ncompile",
            "steps": 0,
            "front": front(config.compile_cache, True, _python(config.run_on)),
            "run_on": job.run_on.model_copy(update={"timeouts": silent}),
        }
    )
    log.info("job %s finds and compiles the graphs", trial.name)
    launch(trial)
    store.write(mark, (json.dumps(options, sort_keys=True, indent=2) + "\n").encode())
    return {"compile_seconds": time.perf_counter() - started}


def _rank(config: Config) -> Result:
    """What each process of the job does: train, and leave its part of the checkpoint."""
    processes, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    request = check(config, processes)
    material = read_material(request.base, request.data, config)
    length, samples = _samples(config, request, material)
    trial = os.environ.get(TRIAL) == "1"
    work = backend.Work(config, request.base, request.layout, request.targets, samples, length, trial)
    publisher = Publisher(config, request, rank)
    trained = backend.train(work, publisher)
    if trial:
        sys.exit(0)  # nothing was computed, so there is nothing to leave
    if rank == 0:
        publisher.finish(trained.history)
    publisher.gather(None)
    metrics = {"tokens_seen": float(samples.tokens(config.steps)), "rows": float(material.rows),
               "rows_dropped": float(material.dropped)}  # fmt: skip
    if trained.history:
        metrics["train_loss"] = trained.history[-1]["loss"]
    return Result(Artifact.open(config.output, "checkpoint"), metrics)


def _samples(config: Config, request: Request, material: Material) -> tuple[int, Ordered]:
    """Tokens a sequence, and the samples of the run."""
    rows: Any = material.train
    facts = request.data.facts
    if isinstance(rows, RowDataset):
        length = config.sequence_length or min(ROW_LENGTH, request.base.facts.max_sequence_length)
        rows = PackedRows(rows, length) if config.neuron.packing else rows
    else:
        length = facts.sequence_length
    plan = BatchPlan(len(rows), config.global_batch_size, config.seed)
    return length, Ordered(rows, plan, config.steps, length, pad=0)


class Publisher:
    """Puts the nodes' parts of each checkpoint into the store; every rank calls it, the first of each node uploads."""

    def __init__(self, config: Config, request: Request, rank: int) -> None:
        self._config, self._request, self._rank = config, request, rank
        self._gather: Any = None
        self._last: list[File] = []
        self._step = 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank."""
        if self._gather is None:
            self._gather = backend.gather_over_ranks()
        found: list[Any] = self._gather(value)
        return found

    def __call__(self, folder: Path, step: int, history: list[backend.Row]) -> None:
        """Store the files of a checkpoint that lie on this node, and once all nodes have, its manifest."""
        files: list[File] = []
        prefix = f"{self._config.output.rstrip('/')}/checkpoint-{step}"
        if os.environ.get("LOCAL_RANK", "0") == "0":
            store = open_store(prefix)
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                name = path.relative_to(folder).as_posix()
                if name.startswith("adapter_") or name == "trainer_state.json":
                    entry = store.upload(path, name)
                    files.append(File(path=name, bytes=entry.bytes, sha256=entry.sha256))
        self._last = [file for part in self.gather(files) for file in part]
        self._step = step
        if self._rank == 0:
            self._commit(prefix, self._last, history)

    def finish(self, history: list[backend.Row]) -> None:
        """Make the last checkpoint the job's artifact, with the training log."""
        folder = f"checkpoint-{self._step}"
        listed = [file.model_copy(update={"path": f"{folder}/{file.path}"}) for file in self._last]
        self._commit(self._config.output, listed, history, log_too=True)

    def _commit(self, uri: str, files: list[File], history: list[backend.Row], log_too: bool = False) -> None:
        key = run_key(COMPONENT, self._config.options(), self._request.inputs())
        facts = CheckpointFacts(step=self._step, run_key=key, train_loss=history[-1]["loss"] if history else None)
        with ArtifactWriter(uri) as writer:
            if not writer.adopt(files):
                raise OSError(f"{uri}: what a node has stored is not there; do all nodes write to the same store?")
            if log_too:
                with writer.create(LOG_NAME) as path:
                    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in history)
                    path.write_text(lines, encoding="utf-8")
            writer.commit(COMPONENT, facts, self._config.options(), self._request.inputs())


def _consolidate(config: Config, request: Request, shards: Artifact) -> Artifact:
    """The adapter artifact out of the ranks' last checkpoint, on this machine's CPU."""
    found = find_checkpoint(LocalStore(shards.fetch_all()))
    with ArtifactWriter(config.output) as writer:
        folder = writer.staging / "adapter"
        facts = write_adapter(found, request.base, folder, config.base_name)
        if facts.rank != config.rank or set(facts.target_modules) != set(request.targets):
            raise ValueError(
                f"{shards.uri}: rank {facts.rank} on {', '.join(facts.target_modules)} was trained, and rank "
                f"{config.rank} on {', '.join(request.targets)} was asked for"
            )
        writer.add_folder(folder)
        with writer.create(LOG_NAME) as path:
            path.write_bytes(shards.read(LOG_NAME))
        return writer.commit(COMPONENT, facts, config.options(), request.inputs())
