"""A device is one that torch has; NeuronCores come by torch's own way of adding devices."""

import subprocess
import sys

import pytest
import torch

from crosstrain.components.core.device import choose_device


def test_the_cpu_is_always_there_and_auto_finds_it():
    assert choose_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_is_refused_without_a_gpu():
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device"):
        choose_device("cuda")


def test_neuron_is_refused_where_torch_has_no_such_device():
    with pytest.raises(ValueError, match=r"device neuron: torch sees no NeuronCore.*TorchNeuron.*optimum_neuron"):
        choose_device("neuron")


NEURON = """
import os, sys, types
import torch
from crosstrain.components.core.device import choose_device

chosen = []
torch.utils.rename_privateuse1_backend("neuron")
module = types.SimpleNamespace(is_available=lambda: {available}, device_count=lambda: 2, set_device=chosen.append)
torch._register_device_module("neuron", module)
os.environ["LOCAL_RANK"] = "{rank}"
try:
    print(choose_device("neuron"), chosen)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("available, rank, words", [
    (True, 1, "neuron:1 [1]"),
    (True, 2, "process 2 of this node has no device of its own: torch sees 2 of neuron"),
    (False, 0, "device neuron: torch sees no NeuronCore"),
])  # fmt: skip
def test_a_registered_neuron_device_is_taken_one_a_process(available, rank, words):
    """In a process of its own: a device's name is given once."""
    code = NEURON.format(available=available, rank=rank)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert words in done.stdout
