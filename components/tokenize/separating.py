"""Plain text that holds many documents, split where one ends, as a stream.

Works on bytes, so that one document that is not UTF-8 does not take its neighbours along.
"""

import re
import tempfile
from collections.abc import Iterator
from typing import IO, BinaryIO

BLANK_LINES = re.compile(rb"\n(?:[ \t]*\n)+")

_LEADING = re.compile(rb"(?:[ \t]*\n)+")
_BLOCK = 1 << 20


def split_stream(stream: BinaryIO, separator: re.Pattern[bytes], long: int) -> Iterator[tuple[int, bytes | IO[bytes]]]:
    """Pieces of a text between separators, with the number of line ends before each; CRLF is read as LF.

    A piece of more than about `long` bytes comes as a file, which is gone when the next one is asked for.
    """
    piece, searched = _Piece(long), 0
    for block in _with_line_feeds(stream):
        held = piece.held
        held += block
        begin = 0
        for start, end in [match.span() for match in separator.finditer(held, searched)]:
            yield from piece.take(begin, start)
            piece.lines += held.count(b"\n", begin, end)
            begin = end
        del held[:begin]
        searched = piece.spill(_unfinished(held, len(separator.pattern)))
    if piece.file or piece.held.strip():
        yield from piece.take(0, len(piece.held))


class _Piece:
    """What was read since the last separator: in memory, and in a file as far as that is too much."""

    def __init__(self, long: int) -> None:
        self.held = bytearray()
        self.lines = 0
        """Line ends before what is held."""
        self.file: IO[bytes] | None = None
        self._long = long
        self._first_line = 0

    def spill(self, end: int) -> int:
        """Put held[:end], which ends in no white space, into the file if it is long; where to search on."""
        if end < self._long:
            return end
        if self.file is None:
            begin = self._begin(0, end)
            self._first_line = self.lines + self.held.count(b"\n", 0, begin)
            self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by take
        else:
            begin = 0
        self.file.write(memoryview(self.held)[begin:end])
        self.lines += self.held.count(b"\n", 0, end)
        del self.held[:end]
        return 0

    def take(self, begin: int, end: int) -> Iterator[tuple[int, bytes | IO[bytes]]]:
        """The piece that ends with held[begin:end], without blank lines at its start and line ends at its end."""
        if self.file is None:
            start = self._begin(begin, end)
            lines = self.lines + self.held.count(b"\n", begin, start)
            yield lines, bytes(self.held[start:end]).rstrip(b"\n")
            return
        with self.file as file:
            self.file = None
            file.write(bytes(self.held[begin:end]).rstrip(b"\n"))
            file.seek(0)
            yield self._first_line, file

    def _begin(self, begin: int, end: int) -> int:
        blank = _LEADING.match(self.held, begin, end)
        return blank.end() if blank else begin


def _with_line_feeds(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks of a file with LF for CRLF, also where a block ends between the two."""
    block = stream.read(_BLOCK)
    while block:
        following = stream.read(_BLOCK)
        yield (block[:-1] if block[-1:] == b"\r" and following[:1] == b"\n" else block).replace(b"\r\n", b"\n")
        block = following


def _unfinished(held: bytearray, longest: int) -> int:
    """Where a separator may begin that the next block completes: in the last bytes, or in white space before them."""
    end = max(0, len(held) - longest)
    while end and held[end - 1] in b" \t\n":
        end -= 1
    return end
