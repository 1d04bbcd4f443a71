"""Names of the container images that faces run in, tied to the package's version.

The name holds "python" because KFP's local runner warns of images that do not; locally no image is used.
Imports nothing, so that a face can import it.
"""

VERSION = "0.1.0"

DATA = f"crosstrain/data-python:{VERSION}"
"""CPU: tokenizing, sharding, merging, evaluating."""
GPU = f"crosstrain/gpu-python:{VERSION}"
"""CUDA with TransformerEngine: training; on a machine without a GPU it trains on the CPU."""
