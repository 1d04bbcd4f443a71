"""Which NVIDIA devices can run which fp8 recipe, asked before anything is built or imported."""

import torch

from crosstrain.components.core.precision.base import RecipeName

FIRST_CAPABILITY = (8, 9)
"""CUDA compute capability from which there are fp8 matrix units: Ada, then Hopper (9.0)."""


def require_fp8_units(device: torch.device, recipe: RecipeName) -> None:
    """Refuse a CUDA device that cannot multiply in a recipe; a CPU emulates and passes.

    Raises:
        ValueError: says what the device lacks and what to ask for instead.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    what = f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}"
    if found < FIRST_CAPABILITY:
        raise ValueError(
            f"precision fp8: {what} and no fp8 units, which begin at 8.9; use precision bf16 on it, or an L4, L40S, "
            "H100 or newer"
        )
    if recipe == "block" and found < (9, 0):
        raise ValueError(f"fp8_recipe block: {what}, and it takes 9.0 or newer; use fp8_recipe current or tensorwise")
    if recipe == "block" and cuda_version() < (12, 9):
        raise ValueError(
            f"fp8_recipe block: this torch is built for CUDA {torch.version.cuda}, and it takes 12.9 or newer; use "
            "fp8_recipe current or tensorwise, or a torch built for CUDA 12.9"
        )
    if recipe == "mxfp8" and not (10, 0) <= found < (12, 0):
        raise ValueError(
            f"fp8_recipe mxfp8: {what}, and it takes 10.x (B200, GB200, B300); use fp8_recipe current or tensorwise"
        )


def cuda_version() -> tuple[int, int]:
    """The CUDA that torch was built for, (0, 0) without."""
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    return int(major), int(minor.partition(".")[0] or 0)
