"""Options of the training loop, shared by every component that trains.

Kept apart from the loop because `--help` and KFP faces read them: nothing here imports torch.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from crosstrain.components.core.config import (
    RUNTIME,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from crosstrain.components.core.parallel.options import DataParallelOptions

Bystander = Annotated[int, Field(ge=1, json_schema_extra={"role": RUNTIME})]
"""An option that only watches or tidies: no part of what the work is, so that it may change on resuming."""


class TrainingOptions(DataParallelOptions):
    """How a model is trained: AdamW, linear warm-up then cosine decay, gradient accumulation, checkpoints, guard."""

    steps: PositiveInt = 200
    """Optimizer steps."""
    seed: NonNegativeInt = 0
    """Seed of initial weights, sample order and dropout."""
    global_batch_size: PositiveInt = 8
    """Sequences an optimizer step, all ranks and micro-batches together."""
    micro_batch_size: PositiveInt = 8
    """Sequences a forward pass of one rank, which may have fewer; gradients accumulate over the passes."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate, reached after warm-up."""
    min_learning_rate_ratio: Fraction = 0.1
    """Last step's learning rate as a fraction of the peak."""
    warmup_steps: NonNegativeInt = 20
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's weight decay; norms, biases and embeddings (a tied lm_head with them) are left out of it."""
    beta1: Fraction = 0.9
    """AdamW's decay of the gradient mean."""
    beta2: Fraction = 0.95
    """AdamW's decay of the squared gradient mean."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's term against division by zero."""
    clip_norm: PositiveFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    evaluate_every: NonNegativeInt = 50
    """Optimizer steps between validation losses (the last step always has one); 0: only after the last step."""
    evaluate_batches: NonNegativeInt = 8
    """Validation micro-batches a validation loss is taken over; 0: the whole validation split."""
    checkpoint_every: PositiveInt = 100
    """Optimizer steps between checkpoints."""
    keep_checkpoints: Bystander = 2
    """Checkpoints kept; older ones are deleted."""
    log_every: Bystander = 1
    """Optimizer steps between progress lines; the training log holds every step."""
    cache_bytes: Annotated[int, Field(ge=0, json_schema_extra={"role": RUNTIME})] = 0
    """Local disk, in bytes, for each split's shards out of object storage; those used longest ago go first. 0: no
    limit."""
    tensorboard: Annotated[bool, Field(json_schema_extra={"role": RUNTIME})] = False
    """Write TensorBoard's event files into the run's state, beside the JSON lines that are always there; needs the
    package tensorboard."""
    device_peak_tflops: Annotated[float, Field(ge=0, json_schema_extra={"role": RUNTIME})] = 0.0
    """Dense BF16 TFLOP/s of a device, which MFU is a fraction of; 0: as the table core/peaks.yaml has it."""
    threads: NonNegativeInt = 0
    """CPU threads; 0: torch's own choice, which OMP_NUM_THREADS sets. The same bits need the same number."""
    compile: bool = False
    """Compile forward and backward with torch.compile: needs a C++ compiler, pays off in runs of many steps."""
    on_divergence: Literal["auto", "stop", "fallback", "skip"] = "auto"
    """What to do on a loss or gradient norm that is not finite, a spike, or saturation. stop: end the run, keeping the
    last good checkpoint. fallback: go back to it and replay in high precision. skip: go back to it and leave out the
    data it fell over. auto: fallback for fp8, else stop."""
    fallback_steps: PositiveInt = 50
    """Optimizer steps in high precision past the one that diverged."""
    fallback_retries: NonNegativeInt = 2
    """Fallbacks or skips a run may take before it is stopped."""
    fallback_layers: Literal["all", "affected"] = "all"
    """What replays in high precision: all layers, or those that saturated at the last look at fp8's numbers
    (fp8_numerics_every), all where none did or when that was not enough."""
    skip_batches: PositiveInt = 1
    """Global batches that a skip leaves out: the one that diverged and those before it, back to the checkpoint."""
    fp8_numerics_every: NonNegativeInt = 0
    """Optimizer steps between looks at amax, underflow and saturation of every fp8 layer, which take about as long as
    a step; 0: never."""
    saturation_limit: Fraction = 0.1
    """A layer that at a look has a larger share of saturated elements in a tensor is a divergence."""
    grad_norm_limit: NonNegativeFloat = 0.0
    """A gradient norm above this many window means is a divergence at once; 0: none is."""
    spike_window: PositiveInt = 20
    """Steps whose mean loss (and gradient norm) a step's is compared with."""
    spike_factor: PositiveFloat = 2.0
    """A loss above this many window means counts as suspicious."""
    spike_patience: PositiveInt = 4
    """Suspicious steps in a row that make a spike."""
    spike_limit: PositiveFloat = 10.0
    """A single loss above this many window means is a spike at once."""

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        size, micro = self.global_batch_size, self.micro_batch_size
        if size % micro:
            near = sorted({max(1, size // micro) * micro, (size // micro + 1) * micro})
            raise ValueError(
                f"global_batch_size {size} is not a multiple of micro_batch_size {micro}; "
                f"nearest: {' or '.join(str(number) for number in near)}"
            )
        return self

    def validation_samples(self, available: int) -> int:
        """How many of the validation samples a validation loss is taken over: the first ones."""
        wanted = self.evaluate_batches * self.micro_batch_size
        return min(available, wanted) if wanted else available
