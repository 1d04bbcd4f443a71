"""Number formats to train in, behind one small interface: `Precision`, chosen by `choose`.

A backend changes a Hugging Face model in place and back again, keeping every module, parameter and name, so
that the optimizer, FSDP2, checkpoints and export never know which one is at work, and a run can change over in
the middle. Backends import their libraries when they are chosen, never before.

`plain` is fp32 and bf16. `fp8` is what the fp8 backends share, `torchao`, `transformer_engine` and `emulated`
the backends; `recipes` holds the arithmetic of scaling, `numerics` watches it. docs/fp8.md says which backend
runs which recipe where.
"""

from crosstrain.components.core.precision.base import Precision, Surroundings, choose

__all__ = ["Precision", "Surroundings", "choose"]
