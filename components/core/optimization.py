"""The optimizer and its learning rate: AdamW, linear warm-up, cosine decay."""

import math

import torch
from torch import nn

from crosstrain.components.core.training_config import TrainingOptions


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW over the parameters that take gradients, in torch's fused form.

    Matrices of linear layers are decayed; norms, biases and everything else of one dimension are not, nor is
    an embedding, nor the lm_head that is tied to it.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if is_matrix else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.adam_epsilon,
        fused=True,
    )


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
