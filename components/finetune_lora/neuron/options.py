"""Options of the backend optimum_neuron; torch-free, because help and faces read them."""

from typing import Annotated, Literal

from pydantic import Field

from crosstrain.components.core.config import RUNTIME, Config, NonNegativeInt, PositiveInt
from crosstrain.components.core.launch.job import RunOn

Backend = Literal["auto", "torch", "optimum_neuron"]

CompileCache = Annotated[str, Field(json_schema_extra={"role": RUNTIME})]
"""Prefix of compiled graphs: what is in it changes how soon training begins, never what it does."""

OPTIMUM_INSTANCES = ("trn1", "trn2")
"""Families of instances that optimum-neuron 0.4.5 and its SDK 2.26.1 know."""


class NeuronOptions(Config):
    """How optimum-neuron spreads a model over NeuronCores."""

    tensor_parallel: PositiveInt = 8
    """NeuronCores that share each layer; processes are this times pipeline_parallel times the data-parallel degree.
    Usual for 8B models: 8 on trn1, 4 on trn2."""
    pipeline_parallel: PositiveInt = 1
    """Stages that the layers are cut into; Llama and Qwen3 alone."""
    pipeline_microbatches: NonNegativeInt = 0
    """Pieces of a rank's batch in flight in the pipeline; 0: one a sequence."""
    zero_1: bool = True
    """Cut optimizer state and FP32 master weights over the data-parallel ranks."""
    packing: bool = False
    """Put several rows into one sequence of sequence_length. optimum-neuron has no mask between them: every row sees
    those before it. Shards are packed already, so they need it."""
    fuse_qkv: bool = False
    """Compute query, key and value in one product, with one A for the three; where there are as many key-value heads as
    query heads, or fewer than ranks."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    flash_attention: bool = True
    """Neuron's fused attention kernel; false: plain products."""
    precompile_steps: PositiveInt = 10
    """Steps of the trial run that finds the graphs to compile, where there is a compile_cache."""


def choose_backend(backend: Backend, device: str, run_on: RunOn) -> Literal["torch", "optimum_neuron"]:
    """The backend for a request; auto: optimum_neuron on Trainium instances, unless the device says otherwise.

    Raises:
        ValueError: the backend cannot run on that instance, or with that device.
    """
    instance = run_on.instance_type.removeprefix("ml.")
    trainium = instance.startswith("trn")
    if backend == "auto":
        backend = "optimum_neuron" if instance.startswith(OPTIMUM_INSTANCES) and device == "auto" else "torch"
    if backend == "optimum_neuron":
        if device in ("cpu", "cuda", "neuron"):
            raise ValueError(
                f"backend optimum_neuron runs on Trainium through torch_xla, and device is {device!r}; leave device "
                "out, or choose backend torch"
            )
        if instance and not instance.startswith(OPTIMUM_INSTANCES):
            raise ValueError(
                f"backend optimum_neuron (Neuron SDK 2.26.1) runs on {' and '.join(OPTIMUM_INSTANCES)}, and "
                f"run_on.instance_type is {run_on.instance_type}; choose backend torch"
                + (" with device neuron (TorchNeuron)" if trainium else "")
            )
        return "optimum_neuron"
    if trainium and (instance.startswith("trn1") or device != "neuron"):
        raise ValueError(
            f"backend torch does not reach the NeuronCores of {run_on.instance_type}: "
            + ("TorchNeuron is for trn2 and trn3; " if instance.startswith("trn1") else "set device neuron, or ")
            + "choose backend optimum_neuron"
        )
    if trainium and run_on.target != "local" and not run_on.image:
        raise ValueError(
            "run_on.image: the packaged Neuron image holds optimum-neuron's SDK 2.26.1, which has no device "
            "'neuron'; name an image with TorchNeuron (Neuron SDK 2.33 or later, Python 3.12) and this package"
        )
    return "torch"
