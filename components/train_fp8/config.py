"""Options of train_fp8; torch-free, because help and faces read them."""

from typing import Literal

from crosstrain.components.core.config import InputURI, NonNegativeInt, OutputURI, PositiveInt, StateURI
from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.core.launch.own_job import Placement
from crosstrain.components.core.parallel.options import ModelParallelOptions
from crosstrain.components.core.precision.base import PrecisionName, RecipeName
from crosstrain.components.core.presets import PresetName
from crosstrain.components.core.training_config import TrainingOptions


class Config(TrainingOptions, ModelParallelOptions):
    """Pre-train a Llama from shards in fp8, bf16 or fp32; the output is a plain Hugging Face model folder."""

    shards: InputURI
    """Training data: a shards artifact. Its train split is trained on, its validation split measured."""
    output: OutputURI
    """Where the model goes: a prefix or folder."""
    state: StateURI = ""
    """Prefix for checkpoints; a killed run with the same options and data resumes from it. Empty: beside the
    output, at <output>.state."""
    preset: PresetName = "tiny"
    """Model size: debug (for tests), tiny (2M parameters with 4096 tokens), 125m, 350m, 1b, 3b, 8b (Llama's shapes)."""
    model_config_json: str = ""
    """Any Llama instead of a preset: the JSON text of a Hugging Face config.json, or the URI of one (whose content
    must not change). The vocabulary is always the shards' tokenizer's."""
    precision: PrecisionName = "fp8"
    """Arithmetic of the matrix products; parameters and optimizer are fp32. On a CPU fp8 is emulated, and called so
    everywhere."""
    fp8_recipe: RecipeName = "tensorwise"
    """Scaling of fp8 tensors. tensorwise: one scale a tensor; rowwise: one a row; both by torchao. current, delayed,
    block (1 x 128, weights 128 x 128), mxfp8 (1 x 32): TransformerEngine's, on a CPU a reference (docs/fp8.md)."""
    fp8_amax_history: PositiveInt = 1024
    """Forward passes that recipe delayed looks back on for its scales."""
    fp8_keep_first: NonNegativeInt = 0
    """Decoder blocks at the input end that stay out of fp8."""
    fp8_keep_last: NonNegativeInt = 0
    """Decoder blocks at the output end that stay out of fp8; lm_head always does."""
    fp8_minimum_features: PositiveInt = 32
    """Linear layers with fewer input or output features than this stay out of fp8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: the first GPU, else the CPU."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights; float32 saves the trained ones exactly."""
    run_on: Placement = RunOn()
    """Where the training runs: in this process, or as a job of several processes or nodes (target, instance_type,
    nodes, queue, priority, volumes, …). No part of what the work is."""
