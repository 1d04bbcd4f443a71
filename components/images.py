"""Names of the container images that faces run in, tied to the package's version.

The name holds "python" because KFP's local runner warns of images that do not; locally no image is used.
Imports nothing, so that a face can import it.
"""

VERSION = "0.1.0"

DATA = "crosstrain/data-python:0.1.0"
"""CPU: tokenizing, sharding, merging, evaluating, and submitting training jobs."""
GPU = "crosstrain/gpu-python:0.1.0"
"""CUDA with TransformerEngine: training; on a machine without a GPU it trains on the CPU."""
NEURON = "crosstrain/neuron-python:0.1.0"
"""Trainium: LoRA fine-tuning through optimum-neuron."""
SUBMIT = "crosstrain/submit-python:0.1.0"
"""The KFP client and `crosstrain`, for the job that submits run files."""
