"""The loss of a model that knows how frequent each token is and nothing else: the line a language model must pass.

Its entropy over held-out text is what training is set beside. Left out on purpose: anything with context.
"""

from collections.abc import Iterable

import numpy as np

from crosstrain.components.core.data import IGNORE, Int64s, Sample, ShardDataset


def count_labels(samples: Iterable[Sample], vocab_size: int) -> Int64s:
    """How often each token is to be predicted; [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.labels[sample.labels != IGNORE], minlength=vocab_size)
    return counts


def unigram_loss(train: ShardDataset, wanted: Int64s, most: int) -> float | None:
    """Cross-entropy (nats/token) of the add-one unigram model of the training split, over the wanted tokens.

    Args:
        train: The training split.
        wanted: How often each token is to be predicted; [vocab_size].
        most: Training tokens to count at most, from the start of the shuffled split.

    Returns:
        None when there is nothing to count or to predict.
    """
    samples = min(len(train), max(1, most // train.sequence_length))
    if samples == 0 or not wanted.any():
        return None
    known = count_labels((train[index] for index in range(samples)), wanted.size)
    log_likelihood = np.log(known + 1.0) - np.log(known.sum() + wanted.size)
    return float(-(wanted * log_likelihood).sum() / wanted.sum())
