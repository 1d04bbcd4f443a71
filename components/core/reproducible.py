"""What makes a run repeat itself bit for bit: seeds, random state, deterministic kernels, a known number of threads."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Run the block with deterministic kernels and a number of CPU threads, then put both back.

    Sums depend on how they are split over threads, so the same bits need the same number. On a GPU torch warns
    of the few kernels that have no deterministic form.

    Args:
        threads: CPU threads; 0 leaves torch's choice.
    """
    before = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if threads:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def seed_rank(seed: int, step: int, part: int) -> None:
    """Seed the generators of one of several ranks, so that each part of the data has its own dropout.

    Args:
        seed: The run's; part 0 at step 0 has it as it is.
        step: Optimizer steps done.
        part: Which part of the global batch is the rank's.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{part}".encode(), digest_size=4).digest()
    seed_everything(int.from_bytes(digest, "little") if step or part else seed)


def random_state() -> dict[str, Any]:
    """State of every random generator: torch (the current CUDA device's too), numpy, Python."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
        "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put every random generator where `random_state` found it.

    Raises:
        ValueError: a part is missing or does not fit this machine: the run would not be the same any more.
    """
    try:
        torch.set_rng_state(state["torch"])
        if len(state["cuda"]) != torch.cuda.is_available():
            raise ValueError(f"it is of {len(state['cuda'])} CUDA devices")
        if state["cuda"]:
            torch.cuda.set_rng_state(state["cuda"][0])
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the checkpoint's random state does not load ({error}); the run cannot go on exactly"
        ) from None
