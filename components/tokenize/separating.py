"""Plain text that holds many documents, split where one ends, as a stream.

Works on bytes, so that one document that is not UTF-8 does not take its neighbours along.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

BLANK_LINES = re.compile(rb"\n(?:[ \t]*\n)+")

_LEADING = re.compile(rb"(?:[ \t]*\n)+")
_BLOCK = 1 << 20


def split_stream(stream: BinaryIO, separator: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """Pieces of a text between separators, with the number of line ends before each; CRLF is read as LF."""
    lines, held, searched = 0, bytearray(), 0
    for block in _with_line_feeds(stream):
        held += block
        begin = 0
        for start, end in [match.span() for match in separator.finditer(held, searched)]:
            yield _piece(held[begin:start], lines)
            lines += held.count(b"\n", begin, end)
            begin = end
        del held[:begin]
        searched = _unfinished(held, len(separator.pattern))
    if held.strip():
        yield _piece(held, lines)


def _with_line_feeds(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks of a file with LF for CRLF, also where a block ends between the two."""
    block = stream.read(_BLOCK)
    while block:
        following = stream.read(_BLOCK)
        yield (block[:-1] if block[-1:] == b"\r" and following[:1] == b"\n" else block).replace(b"\r\n", b"\n")
        block = following


def _piece(data: bytearray, lines: int) -> tuple[int, bytes]:
    """A piece without blank lines at its start and line ends at its end."""
    blank = _LEADING.match(data)
    begin = blank.end() if blank else 0
    return lines + data.count(b"\n", 0, begin), bytes(data[begin:]).rstrip(b"\n")


def _unfinished(held: bytearray, longest: int) -> int:
    """Where a separator may begin that the next block completes: in the last bytes, or in white space before them."""
    end = max(0, len(held) - longest)
    while end and held[end - 1] in b" \t\n":
        end -= 1
    return end
