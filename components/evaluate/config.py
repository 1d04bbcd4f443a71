"""Options of evaluate."""

from typing import Literal, Self

from pydantic import model_validator

from crosstrain.components.core.config import (
    Config as BaseConfig,
)
from crosstrain.components.core.config import (
    InputURI,
    NonNegativeFloat,
    NonNegativeInt,
    OutputURI,
    PositiveInt,
)


class Config(BaseConfig):
    """Measure a candidate model against a baseline on held-out text, decide pass or fail, write a report.

    Both models see the same validation samples; each document's loss of the one is compared with its loss of the
    other. The improvement is the baseline's loss minus the candidate's (nats/token), with a 95% bootstrap interval
    over documents. The verdict is pass when the interval's lower end is not below -margin, and, where
    max_forgetting is set, the same holds of the forgetting set with that margin.
    """

    candidate: InputURI
    """Model artifact to judge: the merged or newly trained model."""
    baseline: InputURI
    """Model artifact to compare with: the base model."""
    data: InputURI
    """Shards artifact whose validation split decides the verdict."""
    output: OutputURI
    """Prefix for the evaluation artifact: report, metrics, losses by document, generations."""
    forgetting: InputURI = ""
    """Shards artifact of what the baseline knew before; its validation split shows what the candidate forgot."""
    adapter: InputURI = ""
    """Adapter artifact that made the candidate: its training log becomes a loss curve of the report."""
    margin: NonNegativeFloat = 0.0
    """Nats/token by which the candidate may be worse and still pass: the lower end of the 95% interval of the
    improvement must not be below -margin; 0 demands that the candidate is not worse."""
    max_forgetting: NonNegativeFloat | None = None
    """Nats/token that the candidate may lose on the forgetting set and still pass, judged in the same way;
    null reports the loss and does not judge it."""
    require_pass: bool = False
    """Fail the step, after its output is written, when the verdict is fail."""
    max_documents: PositiveInt | None = None
    """Documents measured at most, from the start of the shuffled validation split; null measures all."""
    max_samples: PositiveInt | None = None
    """Samples of sequence_length tokens measured at most; null measures all."""
    batch_tokens: PositiveInt = 4096
    """Tokens in one forward pass, at least one sample; bounds the memory of the logits."""
    resamples: PositiveInt = 5000
    """Bootstrap resamples of each interval."""
    seed: NonNegativeInt = 0
    """Seed of the bootstrap."""
    unigram_tokens: PositiveInt = 10_000_000
    """Training tokens counted at most for the unigram model that the losses are set beside."""
    prompts: NonNegativeInt = 4
    """Held-out documents whose beginning both models continue, greedily, for the report."""
    prompt_tokens: PositiveInt = 32
    """Tokens of a prompt; at most half a sample."""
    generated_tokens: PositiveInt = 48
    """Tokens generated at most after a prompt; at most half a sample."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run, always in fp32; auto takes a CUDA device where there is one."""

    @model_validator(mode="after")
    def _gate_has_data(self) -> Self:
        if self.max_forgetting is not None and not self.forgetting:
            raise ValueError("max_forgetting judges the forgetting set, and none is given; add forgetting")
        return self
