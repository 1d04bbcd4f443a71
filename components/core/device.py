"""Where a program computes: the CPU, or which GPU or NeuronCore."""

import os
from typing import Any, Literal

import torch

DeviceName = Literal["auto", "cpu", "cuda", "neuron"]

_LACKS = {
    "cuda": "torch sees no CUDA device on this machine; use device cpu or auto",
    "neuron": "torch sees no NeuronCore; it takes a trn2 or trn3 instance and TorchNeuron (Neuron SDK 2.33 or later), "
    "whose device torch then has by itself; on trn1 use backend optimum_neuron",
}


def choose_device(name: DeviceName) -> torch.device:
    """The device for a name; auto: a GPU where there is one, else the CPU. Each process of a node has its own.

    Raises:
        ValueError: a kind is wanted that torch does not see, or fewer of it than the node has processes.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    module = _module(name)
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= module.device_count():
        raise ValueError(
            f"process {number} of this node has no device of its own: torch sees {module.device_count()} of {name}; "
            "start as many processes"
        )
    module.set_device(number)
    return torch.device(name, number)


def _module(name: str) -> Any:
    """What torch has for a kind of device: `torch.cuda`, or what TorchNeuron registers."""
    try:
        module = torch.get_device_module(name)
    except RuntimeError:
        raise ValueError(f"device {name}: {_LACKS[name]}") from None
    if not module.is_available():
        raise ValueError(f"device {name}: {_LACKS[name]}")
    return module
