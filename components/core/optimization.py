"""The optimizer and its learning rate: AdamW, linear warm-up, cosine decay."""

import math
from collections.abc import Container, Mapping

import torch
from torch import nn

from crosstrain.components.core.training_config import TrainingOptions


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves out.

    Matrices of linear layers are decayed; norms, biases and everything else of one dimension are not, nor is
    an embedding, nor the lm_head that is tied to it.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, item in model.named_parameters() if item.ndim < 2 or id(item) in embeddings}


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], options: TrainingOptions, spared: Container[str]
) -> torch.optim.AdamW:
    """AdamW in torch's fused form.

    Args:
        parameters: What is trained, by name.
        options: Rates and decays.
        spared: Names that are not decayed; see `undecayed`.
    """
    groups = [
        {
            "params": [item for name, item in parameters.items() if name not in spared],
            "weight_decay": options.weight_decay,
        },
        {"params": [item for name, item in parameters.items() if name in spared], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.adam_epsilon,
        fused=True,
    )


def moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The optimizer's state, `<kind>.<parameter>` to the very tensor; made as zeros where no step was taken yet."""
    found: dict[str, torch.Tensor] = {}
    for name, item in parameters.items():
        if not (state := optimizer.state[item]):
            state["step"] = torch.zeros((), device=item.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(item), torch.zeros_like(item)
        found |= {f"{kind}.{name}": tensor for kind, tensor in state.items()}
    return found


def learning_rate(step: int, options: TrainingOptions) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Rises linearly over warmup_steps to the peak, then follows a cosine down to min_learning_rate_ratio of it
    at the last step.
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    decay = max(1, options.steps - 1 - options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / decay)
    ratio = options.min_learning_rate_ratio
    return options.learning_rate * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
