"""Options of compare_arms."""

from typing import Literal

from pydantic import Field

from crosstrain.components.core.config import Config as BaseConfig
from crosstrain.components.core.config import InputURIs, OutputURI, PositiveFloat


class Config(BaseConfig):
    """Compare two ways to train, each run with the same seeds: is the loss gap inside a margin set beforehand?

    A run of the one arm is compared with the run of the other that has its seed: same initial weights, same order of
    samples. The gap is the candidate's held-out loss over the control's, minus one, in percent; its 95% interval is
    Student's over the seeds. Equivalent: the whole interval is inside plus and minus the margin. Different: the whole
    interval is outside. Else it is undecided, and more seeds or steps decide. Speed, memory and cost are told only
    where they were measured on what they are claimed for: never of an emulation.
    """

    control: InputURIs
    """Models or adapters of the control arm, one a seed, with their training logs."""
    candidate: InputURIs
    """Models or adapters of the arm in question, of the same seeds, data and steps."""
    output: OutputURI
    """Where to write the comparison."""
    study: Literal["fp8", "lora"] = "fp8"
    """What the arms differ in. fp8: number formats, and nothing else. lora: full fine-tuning (control) and LoRA
    (candidate) of one model."""
    margin_percent: PositiveFloat = 1.0
    """Margin of equivalence, set before the run: percent of the control's held-out loss."""
    instance_type: str = Field("", max_length=64)
    """Instance type that both arms ran on, for their cost (ml.trn1.32xlarge); empty: not known, unless the runs were
    jobs that recorded their own cost."""
    prices: str = ""
    """Price file over the packaged one, for that instance type."""
