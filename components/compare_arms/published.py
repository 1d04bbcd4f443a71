"""Figures that others published, set beside ours and never mixed with them."""

from dataclasses import dataclass

from crosstrain.components.compare_arms.arms import Study


@dataclass(frozen=True)
class Published:
    """What is known of a claim."""

    rows: tuple[tuple[str, str, str], ...]
    """Which of our figures stands beside it, its name, and the published figure."""
    source: str


TITLES: dict[Study, str] = {
    "fp8": "FP8 against its control: what it costs in loss",
    "lora": "LoRA against full fine-tuning: quality, time, memory, cost",
}

PUBLISHED: dict[Study, Published] = {
    "fp8": Published(
        (
            ("speed", "Speed of FP8 over BF16", "+13% at 1B, +18% at 7B"),
            ("loss", "Loss of FP8 over BF16", "+3% at 1B, +2% at 7B"),
        ),
        "Published for FP8 training on P5 instances with SageMaker, losses after one epoch; the configurations were "
        "not published, and models, data and hardware are others than here.",
    ),
    "lora": Published(
        (
            ("time", "Training time of LoRA against full fine-tuning", "up to -70%"),
            ("cost", "Cost of LoRA against full fine-tuning", "up to -50%"),
        ),
        "Published for LoRA on Trainium; no table of measurements was published, and models, data and hardware are "
        "others than here.",
    ),
}
