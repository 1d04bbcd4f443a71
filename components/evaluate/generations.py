"""What the models write: both continue the beginnings of the same held-out documents, greedily.

A few short passages show a reader what the numbers mean; they decide nothing. Greedy, so that they can be
made again. Left out on purpose: sampling and chat templates, which are a matter of taste and of the prompt.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel

from crosstrain.components.core.data import IGNORE
from crosstrain.components.evaluate.losses import HeldOut


@dataclass(frozen=True)
class Prompt:
    """The beginning of a held-out document."""

    document: int
    ids: NDArray[np.int64]
    """[prompt tokens]; the same number in every prompt."""
    truth: NDArray[np.int64]
    """How the document goes on, without EOS; as long as a generation at most."""


def choose_prompts(
    held_out: HeldOut, count: int, prompt_tokens: int, generated_tokens: int, eos_id: int
) -> list[Prompt]:
    """The first documents that begin in a sample and are longer there than a prompt."""
    chosen: list[Prompt] = []
    if count == 0:
        return chosen
    for _, sample, documents in held_out:
        for document in range(int(documents[0]) + sample.continues, int(documents[-1]) + 1):
            inside = documents == document
            if np.count_nonzero(sample.labels[inside] != IGNORE) < prompt_tokens:
                continue  # too short, or padding
            ids = sample.input_ids[inside]
            truth = ids[prompt_tokens : prompt_tokens + generated_tokens]
            chosen.append(Prompt(document, ids[:prompt_tokens], _before(truth, eos_id)))
            if len(chosen) == count:
                return chosen
    return chosen


@torch.inference_mode()
def continue_prompts(
    model: PreTrainedModel, prompts: list[Prompt], generated_tokens: int, eos_id: int
) -> list[NDArray[np.int64]]:
    """What a model writes after each prompt: the likeliest token at each step, up to and without EOS."""
    if not prompts:
        return []
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts])).to(model.device)
    model.generation_config = GenerationConfig(  # in place of the model's own, which may sample
        do_sample=False, max_new_tokens=generated_tokens, eos_token_id=eos_id, pad_token_id=eos_id
    )
    generate: Any = model.generate  # every causal model's own; its base class does not declare it
    output = generate(ids, attention_mask=torch.ones_like(ids))
    return [_before(row, eos_id) for row in output[:, ids.shape[1] :].cpu().numpy()]


def _before(ids: NDArray[np.int64], eos_id: int) -> NDArray[np.int64]:
    """The ids before the first EOS."""
    return ids[~np.logical_or.accumulate(ids == eos_id)]
