"""Options of preflight; torch-free, because help and faces read them."""

from typing import Annotated, Any

from pydantic import Field

from crosstrain.components.core.config import SOURCE, NonNegativeFloat, NonNegativeInt, OutputURI, StateURI
from crosstrain.components.core.config import Config as Base

Source = Annotated[str, Field(json_schema_extra={"role": SOURCE})]


class Config(Base):
    """Check, before anything is spent, whether a run can work: storage, credentials, model, memory, cluster, images.

    Every finding is told at once, one line each: an error (the run would fail), a warning, or what was not checked
    and why. An error ends the run.
    """

    output: OutputURI
    """Where the run keeps its artifacts: a prefix or folder, written to as a probe."""
    corpus: Source = ""
    """Text that the run reads."""
    tuning_corpus: Source = ""
    """Text of the domain to tune for."""
    model: Source = ""
    """Model that is fine-tuned: a Hugging Face folder or prefix, or hf://organization/name@commit; empty: the one that
    the run trains."""
    state: StateURI = ""
    """Prefix for checkpoints."""
    preset: str = ""
    """Model to pre-train; empty: the run pre-trains none."""
    precision: str = ""
    """Arithmetic of pre-training."""
    vocab_size: NonNegativeInt = 0
    """Entries of the vocabulary of the model to pre-train."""
    sequence_length: NonNegativeInt = 0
    """Tokens a training sample."""
    train_steps: NonNegativeInt = 0
    """Optimizer steps of pre-training."""
    tune_steps: NonNegativeInt = 0
    """Optimizer steps of fine-tuning; 0: the run tunes nothing."""
    method: str = ""
    """lora or dora."""
    rank: NonNegativeInt = 0
    """Rank of the adapter."""
    hours: NonNegativeFloat = 0.0
    """How long the run may take, for credentials that expire; 0: not known."""
    sections: dict[str, Any] = Field(default_factory=dict)
    """The run's `config`: component to its further options."""
