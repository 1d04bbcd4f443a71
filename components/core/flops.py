"""How much arithmetic a token of training is, and how much a device can do: the two halves of MFU.

Model FLOPs utilisation counts what the model needs, not what was computed (recomputed activations count once), over
the dense BF16 peak of the devices, for fp8 too: so that two precisions compare as their times do. Peaks are dated user
input with a source each, in `peaks.yaml`; a device that is not there has no MFU, and a CPU and an emulated format
never have one.
"""

from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import torch
import yaml

from crosstrain.components.core.config import Config, PositiveFloat

INSTANCE_TYPE = Path("/sys/devices/virtual/dmi/id/product_name")
"""Where EC2 nodes of the Nitro kind name their instance type."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of forward and backward, by parts of a model.

    6 a weight and token: 2 in forward, 2 for the gradient of the input and 2 for that of the weight, which a frozen
    weight has not. Weights are those of matrix products: lm_head counts, tied or not, and the input embedding, which is
    looked up, does not. Attention is 12 x width x length a block and token (PaLM, Chowdhery et al. 2022, appendix B),
    halved because a causal mask leaves half of it; that documents are kept apart is not deducted.
    """

    weights: int
    """All that are multiplied by."""
    trained: int
    """Of them those that get a gradient."""
    attention: int
    """Blocks x attention heads x head size."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """Of a Hugging Face causal LM, whole and peft-wrapped or not."""
        config = model.config
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        counted = [item for item in model.parameters() if item.ndim > 1 and (item is not embedding or item is head)]
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            sum(item.numel() for item in counted),
            sum(item.numel() for item in counted if item.requires_grad),
            config.num_hidden_layers * config.num_attention_heads * width,
        )

    def per_token(self, length: float) -> float:
        """FLOPs a token in sequences of `length` tokens."""
        return 4.0 * self.weights + 2.0 * self.trained + 6.0 * self.attention * length


class Peak(Config):
    """What one kind of device can do at most, with where it came from."""

    tflops: PositiveFloat
    """Dense BF16 TFLOP/s of one device."""
    source: str
    """Who says so."""
    date: date
    """The day it was taken down."""


class PeakFile(Config):
    """Layout of peaks.yaml."""

    precision: Literal["bf16"]
    """What the figures hold for."""
    peaks: dict[str, Peak]
    """Part of a device's name to its peak; the first that fits counts."""


@cache
def peaks() -> dict[str, Peak]:
    """The table of peaks.yaml."""
    text = files("crosstrain.components.core").joinpath("peaks.yaml").read_text(encoding="utf-8")
    return PeakFile.decode(yaml.safe_load(text)).peaks


def peak_of(name: str) -> float | None:
    """Dense BF16 FLOP/s of a device by its name; None: not in the table."""
    return next((peak.tflops * 1e12 for part, peak in peaks().items() if part in name), None)


def device_peak(device: torch.device, stated_tflops: float = 0.0) -> float | None:
    """Dense BF16 FLOP/s of this process's device; None: not known, or a CPU.

    Args:
        device: Where it computes.
        stated_tflops: What the user says of it, in TFLOP/s; 0: look in the table.
    """
    if device.type == "cpu":
        return None
    if stated_tflops:
        return stated_tflops * 1e12
    if device.type == "cuda":
        return peak_of(torch.cuda.get_device_name(device))
    return peak_of(INSTANCE_TYPE.read_text().strip()) if INSTANCE_TYPE.is_file() else None
