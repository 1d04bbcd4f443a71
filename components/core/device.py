"""Where a program computes: the CPU, or which GPU."""

import os
from typing import Literal

import torch

DeviceName = Literal["auto", "cpu", "cuda"]


def choose_device(name: DeviceName) -> torch.device:
    """The device for a name; auto: a GPU where there is one, else the CPU. Each process of a node has its own GPU.

    Raises:
        ValueError: cuda is wanted, and torch sees none, or fewer than the node has processes.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device on this machine; use device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        raise ValueError(
            f"process {number} of this node has no GPU: torch sees {torch.cuda.device_count()}; start as many processes"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
