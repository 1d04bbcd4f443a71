"""Where a program computes: which device, and in how many processes. Left out on purpose: several processes."""

import os
from typing import Literal

import torch

DeviceName = Literal["auto", "cpu", "cuda"]


def choose_device(name: DeviceName) -> torch.device:
    """The device for a name; auto: the first GPU, else the CPU.

    Raises:
        ValueError: cuda is wanted, and torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device on this machine; use device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def require_one_process() -> None:
    """Refuse to be one of several processes, as torchrun would start them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ValueError(f"WORLD_SIZE is {world}: this version works in one process only; start it without torchrun")
