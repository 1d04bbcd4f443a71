"""Fine-tuning with LoRA or DoRA: a model and data in, a standard peft adapter out, through one of two backends.

Each backend is imported when it is chosen: on its pinned image optimum-neuron has an older torch than the plain
backend's loop and checkpoints need. Left out on purpose: everything but the choice.
"""

import importlib

from crosstrain.components.core.step import Result
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.neuron.options import choose_backend

BACKENDS = {"torch": "plain", "optimum_neuron": "neuron.run"}


def run(config: Config) -> Result:
    """Tune a model and write the adapter.

    Raises:
        ValueError, FileNotFoundError, PermissionError: an input, option or place does not do, before training; or
            the trained adapter is not what was asked for.
        Diverged: the loss went wrong; the last good checkpoint stands.
        InterruptedError: SIGTERM; a checkpoint was saved.
        JobFailed: `run_on` wants a job, and it did not succeed.
    """
    chosen = BACKENDS[choose_backend(config.backend, config.device, config.run_on)]
    result: Result = importlib.import_module(f"crosstrain.components.finetune_lora.{chosen}").run(config)
    return result
