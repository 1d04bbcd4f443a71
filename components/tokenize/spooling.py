"""Documents too large for memory: kept in a temporary file as UTF-8, and handed out in windows.

A JSON line that is longer than LONG is taken apart as it streams: its long strings go to files, what is left
of it is parsed as ever. So a document may be of any size, and nothing is judged more leniently than in memory.
"""

import codecs
import json
import re
import tempfile
import uuid
from collections.abc import Iterator
from typing import IO, BinaryIO

LONG = 8 << 20
"""Bytes of a line, or of a text file, that are still handled in memory."""

_WINDOW = 1 << 20
_SHORT = 1 << 10
"""Bytes of a string that stays in the line; names of fields are no longer than that."""
_REST = 32 << 20
"""Bytes of a line beside its long strings, at most."""

_CONTENT = re.compile(
    rb"(?:[^\"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]|\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?+)*+",
    re.DOTALL,
)
"""The inside of a JSON string up to its end, or to an escape that is not whole yet; never parts a surrogate pair."""

_ESCAPE = 12
"""Bytes of the longest escape: a surrogate pair."""


class LongText:
    """The text of a document on disk; close it."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the document
        self.surrogates = False
        """Whether there are lone surrogates in it, so that it is no Unicode text."""

    def write(self, text: str) -> None:
        """Append text."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            self.surrogates = True
            return
        self._file.write(data)

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()

    def windows(self) -> Iterator[str]:
        """The text in pieces of about a MiB, as it is encoded and hashed: without a byte order mark, LF for CRLF."""
        self._file.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        held, first = "", True
        while data := self._file.read(_WINDOW):
            text = held + decoder.decode(data)
            if first:
                text, first = text.removeprefix("\ufeff"), False
            held = "\r" if text.endswith("\r") else ""
            text = text.removesuffix(held)
            if text:
                yield text.replace("\r\n", "\n")
        if held:
            yield held

    def head(self, characters: int) -> str:
        """The first characters."""
        text = ""
        for window in self.windows():
            text += window
            if len(text) >= characters:
                break
        return text[:characters]


def spool_file(start: bytes, stream: BinaryIO) -> LongText:
    """A whole stream of UTF-8 that begins with `start`.

    Raises:
        UnicodeDecodeError: it is not; `object` holds the bytes before the fault that a line can be counted in.
    """
    text, before = LongText(), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 0
    data = start
    while data:
        kept = len(decoder.getstate()[0])
        try:
            text.write(decoder.decode(data))
        except UnicodeDecodeError as error:
            text.close()
            begin = before - kept + error.start
            lines += data.count(b"\n", 0, max(error.start - kept, 0))
            raise UnicodeDecodeError("utf-8", b"\n" * lines, begin, begin + 1, error.reason) from None
        before += len(data)
        lines += data.count(b"\n")
        data = stream.read(_WINDOW)
    decoder.decode(b"", final=True)
    return text


class LongLine:
    """A JSON line of which only the start was read; `spool` reads the rest."""

    def __init__(self, start: bytes, stream: BinaryIO) -> None:
        self._scanner = _Scanner(start, stream)

    @property
    def size(self) -> int:
        """Bytes of the line that were read: all, after `spool`."""
        return self._scanner.size

    def spool(self) -> tuple[bytes, dict[str, LongText]]:
        """The line with each long string replaced by a name, and the long strings by name.

        Raises:
            ValueError: a string is broken, or the line is too long without its strings; it is read to its end then.
        """
        try:
            return self._scanner.run()
        except ValueError:
            for text in self._scanner.texts.values():
                text.close()
            self._scanner.skip()
            raise


class _Scanner:
    """One pass over a line."""

    def __init__(self, start: bytes, stream: BinaryIO) -> None:
        self.buffer, self.at, self.size = start, 0, len(start)
        self.texts: dict[str, LongText] = {}
        self._stream = stream
        self._ended = start.endswith(b"\n")
        self._rest = bytearray()

    def fill(self) -> bool:
        """Read on, and forget what is behind; False at the line's end."""
        data = b"" if self._ended else self._stream.readline(_WINDOW)
        self._ended = not data or data.endswith(b"\n")
        self.buffer, self.at = self.buffer[self.at :] + data, 0
        self.size += len(data)
        return bool(data)

    def skip(self) -> None:
        """Read to the line's end."""
        self.at = len(self.buffer)
        while self.fill():
            self.at = len(self.buffer)

    def run(self) -> tuple[bytes, dict[str, LongText]]:
        """The rest, and the long strings."""
        while True:
            quote = self.buffer.find(b'"', self.at)
            end = quote + 1 or len(self.buffer)
            self._keep(self.buffer[self.at : end])
            self.at = end
            if quote >= 0:
                self._string()
            elif not self.fill():
                return bytes(self._rest), self.texts

    def _keep(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > _REST:
            raise ValueError(f"more than {_REST >> 20} MiB on one line beside its long strings")

    def _string(self) -> None:
        """One string, of which the opening quote is behind."""
        text: LongText | None = None
        while True:
            match = _CONTENT.match(self.buffer, self.at)
            assert match is not None
            end = match.end()
            closed = self.buffer[end : end + 1] == b'"'
            if closed and text is None and end - self.at <= _SHORT:
                self._keep(self.buffer[self.at : end + 1])
                self.at = end + 1
                return
            if not closed and text is None and len(self.buffer) - self.at <= _SHORT + _ESCAPE:
                if not self.fill():
                    raise ValueError("broken JSON: a string does not end")
                continue
            if text is None:
                name = f"long-{uuid.uuid4().hex}"
                self.texts[name] = text = LongText()
                self._keep(name.encode() + b'"')
            if not closed:
                if len(self.buffer) - end > _ESCAPE:
                    raise ValueError("broken JSON: invalid escape in a string")
                end = _whole_characters(self.buffer, self.at, end)
            content = self.buffer[self.at : end].decode("utf-8")
            text.write(json.loads(f'"{content}"'))
            self.at = end + closed
            if closed:
                return
            if not self.fill():
                raise ValueError("broken JSON: a string does not end")


def _whole_characters(data: bytes, begin: int, end: int) -> int:
    """Where the last whole UTF-8 character before `end` ends."""
    for place in range(end - 1, max(begin, end - 4) - 1, -1):
        if data[place] & 0xC0 != 0x80:
            width = 1 if data[place] < 0x80 else 2 if data[place] < 0xE0 else 3 if data[place] < 0xF0 else 4
            return end if place + width <= end else place
    return end
