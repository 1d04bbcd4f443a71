"""Cutting a huge document where the ids do not notice, so that memory stays bounded whatever a document's size.

A tokenizer that splits words first gives the same ids when a text is cut at such a split. Where those are
differs from tokenizer to tokenizer, so a likely place is tried: only if the text around it gives the same ids whole
and cut is it used.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

from crosstrain.components.core.tokenizer import Tokenizer

PIECE = 1 << 18
"""Characters of a piece, where the text lets itself be cut."""

LONGEST = 1 << 24
"""Characters of the longest piece: so long without a place to cut is no text."""

_CONTEXT = 256
"""Characters on either side of a cut that are encoded to check it."""

_TRIES = 4

_LIKELY = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=[a-z])(?= [a-z])",
        r"(?<=\w)(?= \w)",
        r"(?<=\S\n)(?=\S)",
        r"(?<=\w)(?=[^\w\s])",
        r"(?<=[^\w\s])(?=\w)",
        r"(?<=\S)(?=\s)",
        r"(?<=\D\d{3})(?=\d{3}\D)",
    )
)


def find_cuts(text: str, tokenizer: Tokenizer, parse_special: bool) -> list[int]:
    """Where to cut a text so that the ids of the pieces, one after the other, are the text's; [] for a short one.

    Raises:
        ValueError: there is no place to cut within LONGEST characters.
    """
    cuts: list[int] = []
    start = 0
    while len(text) - start > PIECE:
        start = _find_cut(text, start, tokenizer, parse_special)
        if start == len(text):
            break
        cuts.append(start)
    return cuts


def cut_stream(windows: Iterable[str], tokenizer: Tokenizer, parse_special: bool) -> Iterator[str]:
    """Pieces of a text that comes in windows; their ids, one after the other, are the text's.

    Raises:
        ValueError: there is no place to cut within LONGEST characters.
    """
    held = ""
    for window in windows:
        held += window
        start = 0
        while len(held) - start > 2 * PIECE:
            cut = _find_cut(held, start, tokenizer, parse_special)
            if cut > len(held) - _CONTEXT:  # what follows is not known yet
                break
            yield held[start:cut]
            start = cut
        held = held[start:]
    yield from (held[begin:end] for begin, end in pairwise([0, *find_cuts(held, tokenizer, parse_special), len(held)]))


def _find_cut(text: str, start: int, tokenizer: Tokenizer, parse_special: bool) -> int:
    """Where the piece that begins at `start` may end."""
    half = PIECE // 2
    for low in range(start + half, start + LONGEST, half):
        if low >= len(text):
            return len(text)
        for pattern in _LIKELY:
            for match in islice(pattern.finditer(text, low, low + half), _TRIES):
                if _is_safe(text, match.start(), tokenizer, parse_special):
                    return match.start()
    raise ValueError(f"{LONGEST:,} characters without a place where the tokenizer can cut")


def _is_safe(text: str, cut: int, tokenizer: Tokenizer, parse_special: bool) -> bool:
    left, right = text[max(0, cut - _CONTEXT) : cut], text[cut : cut + _CONTEXT]
    ids, lengths = tokenizer.encode_flat([left + right, left, right], parse_special)
    whole = int(lengths[0])
    return whole == int(lengths[1] + lengths[2]) and bool((ids[:whole] == ids[whole:]).all())
