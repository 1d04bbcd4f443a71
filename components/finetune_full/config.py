"""Options of finetune_full; torch-free, because help and faces read them."""

from typing import Literal

from crosstrain.components.core.config import (
    InputURI,
    NonNegativeFloat,
    NonNegativeInt,
    OutputURI,
    PositiveFloat,
    PositiveInt,
    StateURI,
)
from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.core.launch.own_job import Placement
from crosstrain.components.core.training_config import TrainingOptions


class Config(TrainingOptions):
    """Fine-tune every weight of a model on shards; the output is a plain Hugging Face model folder.

    What LoRA is compared with. Weights, gradients and optimizer are fp32: 16 bytes a parameter.
    """

    model: InputURI
    """Model artifact to tune."""
    data: InputURI
    """Shards artifact. Its train split is trained on, its validation split measured."""
    output: OutputURI
    """Where the tuned model goes: a prefix or folder."""
    state: StateURI = ""
    """Prefix for checkpoints; a killed run with the same options and data resumes from it. Empty: beside the
    output, at <output>.state."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: the first GPU, else the CPU."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate, reached after warm-up; about a tenth of what LoRA takes."""
    warmup_steps: NonNegativeInt = 10
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay; norms, biases and embeddings are left out of it."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights; float32 saves the trained ones exactly."""
    run_on: Placement = RunOn()
    """Where the training runs: in this process, or as a job of several processes or nodes (target, instance_type,
    nodes, queue, priority, volumes, …). No part of what the work is."""
