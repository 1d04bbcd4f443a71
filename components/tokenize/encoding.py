"""From the texts of one unit to one part: `.bin`, `.idx` and `.hash`, in batches bounded by characters.

One BOS goes before a document where the tokenizer wants one, one EOS behind it; no other id is added. The
`.hash` file holds one little-endian uint64 a document, the hash of its text, by which shard splits; the `.size`
file, made only for deduplication, holds the bytes of its text likewise.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from crosstrain.components.core.tokenizer import Tokenizer
from crosstrain.components.core.tokens import PairWriter, token_dtype
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.pieces import PIECE, cut_stream, find_cuts
from crosstrain.components.tokenize.spooling import LongText
from crosstrain.components.tokenize.tally import Counts, Tally

BATCH = {"fastokens": 1 << 21, "tokenizers": 1 << 20}
"""Characters encoded at once by each encoder; the tokenizers library needs some 130 bytes of memory for each."""

AHEAD = 1
"""Batches that are encoded, or wait for it, while the next one is read."""

Report = Callable[[int, int], None]
"""Called after each batch with its finished documents and its tokens."""


def write_part(
    texts: Iterator[str | LongText], stem: Path, tokenizer: Tokenizer, config: Config, tally: Tally, report: Report
) -> Counts:
    """Encode the documents of a unit into the part at `stem`; what became of them."""
    with PartWriter(stem, tokenizer, config, report) as part:
        for text in texts:
            if isinstance(text, LongText):
                _add_long(text, part, tokenizer, config, tally)
                continue
            text = normalize(text)
            if not text or text.isspace():
                tally.empty += 1
                continue
            try:
                cuts = find_cuts(text, tokenizer, config.parse_special)
            except ValueError as error:
                tally.invalid(str(error))
                continue
            part.add(text, cuts)
    return Counts(
        read=tally.read,
        empty=tally.empty + part.empty,
        null=tally.null,
        quarantined=tally.quarantined,
        documents=part.documents,
        tokens=part.tokens,
        text_bytes=part.text_bytes,
    )


def _add_long(text: LongText, part: "PartWriter", tokenizer: Tokenizer, config: Config, tally: Tally) -> None:
    """Append a document that is on disk, after a first look at all of it: an invalid one leaves no piece behind."""
    if all(window.isspace() for window in text.windows()):
        tally.empty += 1
        return
    try:
        for _ in cut_stream(text.windows(), tokenizer, config.parse_special):
            pass
    except ValueError as error:
        tally.invalid(str(error))
        return
    digest = hash_windows(text.windows())
    pieces = cut_stream(text.windows(), tokenizer, config.parse_special)
    piece, first = next(pieces), True
    for following in pieces:
        part.add_piece(piece, first, None)
        piece, first = following, False
    part.add_piece(piece, first, digest)


def normalize(text: str) -> str:
    """The text as it is encoded and hashed: without a byte order mark at its start, with LF for CRLF."""
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n") if "\r" in text else text


def hash_text(text: str) -> tuple[int, int]:
    """A text's 64-bit hash (the start of its SHA-256), and its size in UTF-8 bytes."""
    return hash_windows(text[begin : begin + PIECE] for begin in range(0, len(text), PIECE))


def hash_windows(windows: Iterable[str]) -> tuple[int, int]:
    """The same of a text that comes in windows."""
    digest, size = hashlib.sha256(), 0
    for window in windows:
        data = window.encode()
        digest.update(data)
        size += len(data)
    return int.from_bytes(digest.digest()[:8], "little"), size


@dataclass
class _Batch:
    """Pieces that are encoded together, and what is known of the documents that end among them."""

    pieces: list[str] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    characters: int = 0


class PartWriter:
    """Writes one part. Use as a context manager; the counts are final when the block has ended.

    A batch is encoded in a thread (the encoders leave the interpreter free) while the next one is read and hashed.
    """

    def __init__(self, stem: Path, tokenizer: Tokenizer, config: Config, report: Report) -> None:
        self._pair = PairWriter(stem, token_dtype(tokenizer.vocab_size))
        self._hash_file = stem.with_name(stem.name + ".hash").open("wb")
        self._size_file = stem.with_name(stem.name + ".size").open("wb") if config.deduplicate else None
        self._tokenizer = tokenizer
        self._parse_special = config.parse_special
        self._append_eos = config.append_eos
        self._report = report
        self._batch = _Batch()
        self._batch_characters = BATCH[tokenizer.encoder]
        self._encoding: deque[tuple[_Batch, Future[tuple[NDArray[np.uint32], NDArray[np.int64]]]]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._open_tokens = 0
        """Ids written of the document that is not complete yet."""
        self.empty = 0
        """Documents that gave no id at all."""
        self.text_bytes = 0

    @property
    def documents(self) -> int:
        return self._pair.documents

    @property
    def tokens(self) -> int:
        return self._pair.tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                while self._encoding:
                    self._take()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._close(kind, error, trace)

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hash_file.close()
        if self._size_file is not None:
            self._size_file.close()
        self._pair.__exit__(kind, error, trace)

    def add(self, text: str, cuts: list[int]) -> None:
        """Append a document, encoded in the pieces between `cuts`."""
        digest = hash_text(text)
        for begin, end in pairwise([0, *cuts, len(text)]):
            self.add_piece(text[begin:end], begin == 0, digest if end == len(text) else None)

    def add_piece(self, piece: str, first: bool, digest: tuple[int, int] | None) -> None:
        """Append a piece of a document; the last one comes with the document's hash and size (`hash_text`)."""
        batch = self._batch
        batch.pieces.append(piece)
        batch.first.append(first)
        batch.last.append(digest is not None)
        batch.characters += len(piece)
        if digest is not None:
            batch.hashes.append(digest[0])
            batch.sizes.append(digest[1])
        if batch.characters >= self._batch_characters:
            self._flush()

    def _flush(self) -> None:
        """Have the gathered batch encoded, and write the oldest that is if there are enough ahead."""
        if self._batch.pieces:
            encoding = self._thread.submit(self._tokenizer.encode_flat, self._batch.pieces, self._parse_special)
            self._encoding.append((self._batch, encoding))
            self._batch = _Batch()
        if len(self._encoding) > AHEAD:
            self._take()

    def _take(self) -> None:
        """Write the oldest batch that is being encoded."""
        batch, encoding = self._encoding.popleft()
        ids, lengths = self._surround(batch, *encoding.result())
        ends = np.cumsum(lengths)[np.array(batch.last)]
        documents = np.diff(ends, prepend=0)
        if documents.size:
            documents[0] += self._open_tokens
            self._open_tokens = ids.size - int(ends[-1])
        else:
            self._open_tokens += ids.size
        self._pair.write_ids(ids)
        full = documents > 0
        self._pair.end_documents(documents[full])
        sizes = np.array(batch.sizes, "<u8")[full]
        np.array(batch.hashes, "<u8")[full].tofile(self._hash_file)
        if self._size_file is not None:
            sizes.tofile(self._size_file)
        self.text_bytes += int(sizes.sum())
        self.empty += int((~full).sum())
        self._report(int(full.sum()), ids.size)

    def _surround(
        self, batch: _Batch, ids: NDArray[np.uint32], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Put BOS before first and EOS behind last pieces, unless parsed text has put it there already."""
        bos, eos = self._tokenizer.bos_id, self._tokenizer.eos_id
        add_bos = np.array(batch.first) & (bos is not None)
        add_eos = np.array(batch.last) & self._append_eos
        ends = np.cumsum(lengths)
        starts = ends - lengths
        if self._parse_special and ids.size:
            full = lengths > 0
            add_bos &= ~(full & (ids[np.minimum(starts, ids.size - 1)] == bos)) if bos is not None else False
            add_eos &= ~(full & (ids[np.maximum(ends - 1, 0)] == eos))
        where = np.column_stack([starts, ends])
        added = np.column_stack([add_bos, add_eos])
        values = np.broadcast_to(np.array([0 if bos is None else bos, eos], np.uint32), where.shape)
        return np.insert(ids, where[added], values[added]), lengths + added.sum(axis=1)
