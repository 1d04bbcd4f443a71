"""Number formats to train in, behind one small interface: `Precision`, chosen by `choose`.

A backend changes a Hugging Face model in place and back again, keeping every parameter object and name, so
that the optimizer, checkpoints and export never know which one is at work, and a run can change over in the
middle. Backends import their libraries when they are chosen, never before.

Backends: `plain` (fp32, bf16) and `torchao` (fp8: emulated on a CPU, real on a GPU that can). A new one
(TransformerEngine) is a module here and a line in `choose`.
"""

from crosstrain.components.core.precision.base import Precision, choose

__all__ = ["Precision", "choose"]
