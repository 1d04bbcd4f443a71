"""Model and machine: whether the batch and the model fit the processes, the device the precision, memory the model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstrain.components.core.findings import Finding, error, not_checked, warning
from crosstrain.components.core.launch.instances import Instance
from crosstrain.components.core.launch.own_job import NEURON_RESOURCES
from crosstrain.components.core.memory import (
    FP32,
    GIB,
    HALF,
    Cut,
    Estimate,
    Recomputation,
    Shape,
    estimate_training,
    estimate_tuning,
)
from crosstrain.components.core.parallel import layout as layouts
from crosstrain.components.core.parallel.layout import Layout, Work
from crosstrain.components.preflight.work import PRETRAIN, TUNE, Training

FULL = 0.9
"""Share of a device's memory above which an estimate is a warning: it leaves out fragments and buffers."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


ALIGNMENT = {"block": 128, "mxfp8": 32}
"""What dimensions of fp8 matrix products are multiples of, by recipe; others 16. See core/precision/recipes."""


def check_layout(training: Training) -> Iterator[Finding]:
    """Whether batch and model divide over the processes, and samples fit the model."""
    where = f"{training.component} layout"
    try:
        layout_of(training)
    except ValueError as fault:
        yield error(where, fault, "change the degrees, the batch or run_on.nodes")
    longest = training.shape.get("max_position_embeddings")
    if longest and training.sequence_length > longest:
        what = f"sequence_length {training.sequence_length} is above the model's {longest} positions"
        yield error(where, what, "shard with a smaller one")
    if training.component == PRETRAIN and training.config.precision == "fp8":
        yield from _fp8_dimensions(training, where)


def layout_of(training: Training) -> Layout:
    """The layout that the step will take.

    Raises:
        ValueError: there is none, with the reason and the nearest one.
    """
    step: Any = training.config
    if training.component != PRETRAIN:
        vocab = training.vocab or step.neuron.tensor_parallel  # not known: taken as divisible
        settings = {"model_type": "llama", **training.shape, "vocab_size": vocab} if training.shape else {}
        if (spread := step.neuron_layout(training.processes, settings)) is not None:
            return spread
        return layouts.check_layout({}, training.processes, Work(step.global_batch_size, step.micro_batch_size), step)
    work = Work(
        step.global_batch_size,
        step.micro_batch_size,
        schedule=step.pipeline_schedule,
        alignment=ALIGNMENT.get(step.fp8_recipe, 16) if step.precision == "fp8" else 1,
        minimum_features=step.fp8_minimum_features,
    )
    vocab = training.vocab or step.tensor_parallel  # not known: taken as divisible
    return layouts.check_layout({**training.shape, "vocab_size": vocab}, training.processes, work, step, step)


def _fp8_dimensions(training: Training, where: str) -> Iterator[Finding]:
    multiple = ALIGNMENT.get(training.config.fp8_recipe, 16)
    for name in ("hidden_size", "intermediate_size"):
        size = training.shape.get(name, 0)
        if size >= training.config.fp8_minimum_features and size % multiple:
            near = round(size / multiple) * multiple
            what = f"fp8_recipe {training.config.fp8_recipe} wants {name} in multiples of {multiple}, not {size}"
            yield error(where, what, f"nearest: {near}")


def check_device(training: Training) -> Iterator[Finding]:
    """Whether the accelerator can do what is asked of it; a substitute is never taken in silence."""
    step, instance, where = training.config, training.instance, f"{training.component} device"
    if instance is None:
        if training.on_cluster:
            yield not_checked(where, "run_on names no instance_type", "name one, so that device and memory are checked")
        return
    name = f"{training.run_on.instance_type} ({instance.accelerator or 'no accelerator'})"
    neuron = any(resource.startswith(NEURON_RESOURCES) for resource in instance.devices)
    if training.component == PRETRAIN:
        if neuron:
            yield error(where, f"train_fp8 does not run on {name}", "choose an instance with NVIDIA GPUs, or CPUs")
        elif step.precision == "fp8" and instance.devices and not instance.fp8:
            yield error(where, f"{name} has no FP8 arithmetic", "use precision bf16, or an H100, H200 or newer")
    if step.device == "cuda" and "nvidia.com/gpu" not in instance.devices:
        yield error(where, f"device cuda, and {name} has no CUDA device", "use device auto")


def check_memory(training: Training) -> Iterator[Finding]:
    """The estimate of core/memory against what one process's device has."""
    where = f"{training.component} memory"
    unknown = [name for name, value in (("the model's shape", training.shape), ("its vocabulary", training.vocab),
                                        ("sequence_length", training.sequence_length)) if not value]  # fmt: skip
    if unknown:
        yield not_checked(where, f"{' and '.join(unknown)} not known before the run")
        return
    try:
        estimate = _estimate(training)
    except ValueError as fault:
        yield not_checked(where, fault)
        return
    if training.instance is not None:
        has, name = _device_bytes(training.instance, training), training.run_on.instance_type
    elif training.on_cluster or os.environ.get("KFP_POD_NAME"):
        yield not_checked(where, f"it needs about {estimate} a process, and the pod's memory is not known here")
        return
    elif Path("/dev/nvidiactl").exists():
        yield not_checked(where, f"it needs about {estimate}, and this machine's GPU is not asked here")
        return
    else:
        has, name = _machine_bytes() / training.processes, "this machine"
    what = f"needs about {estimate} a process, and {name} has {has / GIB:.1f} GiB for each"
    advice = "more nodes, a smaller micro_batch_size or sequence_length, or a smaller model"
    if estimate.total > has:
        yield error(where, what, advice)
    elif estimate.total > FULL * has:
        yield warning(where, f"{what}: close", advice)


def _estimate(training: Training) -> Estimate:
    """The estimate for the layout that the step will take.

    Raises:
        ValueError: there is no such layout, or the model's configuration lacks a size.
    """
    step: Any = training.config
    layout, shape = layout_of(training), Shape.read(training.shape, training.vocab)
    own = training.component == TUNE and step.neuron.gradient_checkpointing
    recompute: Recomputation = "full" if own else step.activation_checkpointing
    cut = Cut(
        tokens=layout.micro_batch * training.sequence_length,
        shard=layout.shard,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        recompute=recompute,
        in_flight=min(layout.micro_batches, layout.pipeline) if layout.schedule == "1f1b" else layout.micro_batches,
    )
    if training.component == PRETRAIN:
        return estimate_training(shape, cut, half=step.precision != "fp32")
    return estimate_tuning(shape, cut, step.rank, HALF if step.base_dtype == "bfloat16" else FP32)


def _device_bytes(instance: Instance, training: Training) -> float:
    """Memory that one process's accelerator has, or its part of the node's where there is none."""
    per_node = training.processes / training.run_on.nodes
    if instance.devices:
        return sum(instance.devices.values()) * instance.device_memory_gib * GIB / max(per_node, instance.processes)
    return instance.memory_gib * GIB / per_node


def _machine_bytes() -> int:
    """Memory of this machine, or of the container it is."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found.append(int(text))
    return min(found)
