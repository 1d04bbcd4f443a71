"""Rows to imitate: JSONL with prompt and completion, or with chat messages, as samples with masked labels.

A row is `[BOS] given … learned … [EOS]`, and only what is to be learned has labels. Texts that meet at such a border
are encoded apart, as they are when the model answers: the prompt is encoded first, and the model adds ids to it.
Labels are kept by position, never by looking for an id, so that the final EOS keeps its label where the pad is the
same id. BOS: exactly one where the tokenizer or the chat template wants one. Several rows in one sequence: see
`packing`.
"""

import gzip
import io
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.data import IGNORE, Sample
from crosstrain.components.core.tokenizer import Tokenizer, read_settings, token_text
from crosstrain.components.finetune_lora.chat import ChatTemplate
from crosstrain.components.finetune_lora.config import Config

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class Piece:
    """Text of a row, all given or all to be learned."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Row:
    """One row before it is encoded."""

    pieces: tuple[Piece, ...]
    chat: bool
    """Whether the text is rendered by a chat template, so that the text of a control token means the token."""


class RowDataset:
    """Samples of different lengths, one a row, held as one array of ids."""

    def __init__(
        self, ids: NDArray[np.uint32], learned: NDArray[np.bool_], lengths: Sequence[int], dropped: int
    ) -> None:
        self._ids, self._learned = ids, learned
        self.lengths = lengths
        """Ids of each row."""
        self._ends = np.cumsum(np.array(lengths, np.int64))
        self.dropped = dropped
        """Rows left out because no id of theirs has a label."""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        begin, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        ids = self._ids[begin:end].astype(np.int64)
        return Sample(ids, np.where(self._learned[begin:end], ids, IGNORE), np.arange(end - begin))


def read_rows(corpus: Artifact, tokenizer: Tokenizer, config: Config, sequence_length: int) -> RowDataset:
    """Encode every row of a JSONL corpus.

    Args:
        corpus: Corpus artifact of JSONL files.
        tokenizer: The model's.
        config: Names of the fields.
        sequence_length: Ids a row is cut to, at its end.

    Raises:
        ValueError: a line is not UTF-8 or no JSON object, a row has neither form, the chat template does not
            render it, or no row has anything to learn from. The message has file and line.
    """
    if corpus.facts.format != "jsonl":
        raise ValueError(
            f"{corpus.uri}: a corpus of {corpus.facts.format} files has no prompts; give JSONL rows, or "
            "tokenize and shard it"
        )
    bos = _bos(tokenizer)
    template = ChatTemplate(tokenizer)
    ids: list[NDArray[np.uint32]] = []
    learned: list[NDArray[np.bool_]] = []
    dropped = 0
    for batch in _batches(_rows(corpus, template, config)):
        for row_ids, row_learned in _encode(batch, tokenizer, bos):
            row_ids, row_learned = row_ids[:sequence_length], row_learned[:sequence_length]
            if row_learned[1:].any():  # nothing comes before the first id that could predict it
                ids.append(row_ids)
                learned.append(row_learned)
            else:
                dropped += 1
    if not ids:
        raise ValueError(
            f"{corpus.uri}: none of {dropped} rows has anything to learn from within sequence_length={sequence_length} "
            "tokens; raise it, shorten the prompts, or check the field names"
        )
    if dropped:
        log.warning(
            "%d of %d rows dropped: nothing to learn from within %d tokens",
            dropped,
            dropped + len(ids),
            sequence_length,
        )
    return RowDataset(np.concatenate(ids), np.concatenate(learned), [len(row) for row in ids], dropped)


def _rows(corpus: Artifact, template: ChatTemplate, config: Config) -> Iterator[Row]:
    for where, values in _json_lines(corpus):
        if values.get(config.messages_field) is not None:
            spans = template.spans(values[config.messages_field], where)
            yield Row(tuple(Piece(text, is_learned) for text, is_learned in spans), chat=True)
            continue
        texts = [values.get(name) for name in (config.prompt_field, config.completion_field)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{where}: has neither the text fields {config.prompt_field!r} and {config.completion_field!r} nor "
                f"{config.messages_field!r} (it has {', '.join(sorted(values)) or 'none'}); set the names of the fields"
            )
        yield Row((Piece(str(texts[0]), False), Piece(str(texts[1]), True)), chat=False)


def _json_lines(corpus: Artifact) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of each file, with the place it stands at; blank lines are passed over."""
    for file in corpus.manifest.files:
        with corpus.fetch(file.path).open("rb") as raw:
            for number, line in enumerate(_decompressed(raw, file.path), 1):
                if not line.strip():
                    continue
                where = f"{corpus.files.locate(file.path)}, line {number}"
                try:
                    values = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where}: not UTF-8 at byte {error.start} of the line") from None
                except ValueError as error:
                    raise ValueError(f"{where}: not JSON ({error})") from None
                if not isinstance(values, dict):
                    raise ValueError(f"{where}: a JSON object is wanted, and this is a {type(values).__name__}")
                yield where, values


def _decompressed(raw: IO[bytes], name: str) -> IO[bytes]:
    if name.endswith(".gz"):
        return gzip.open(raw)  # type: ignore[return-value]
    if name.endswith(".zst"):
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
    return raw


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _encode(
    rows: list[Row], tokenizer: Tokenizer, bos: int | None
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
    """Ids of each row and which of them are to be learned."""
    for row, pieces in zip(rows, _encode_pieces(rows, tokenizer), strict=True):
        parts = [(ids.astype(np.uint32), piece.learned) for piece, ids in zip(row.pieces, pieces, strict=True)]
        if not row.chat:
            parts.append((np.array([tokenizer.eos_id], np.uint32), True))
        ids = np.concatenate([part for part, _ in parts])
        learned = np.concatenate([np.full(len(part), is_learned) for part, is_learned in parts])
        yield _with_one_bos(ids, learned, bos, wanted=tokenizer.bos_id is not None)


def _encode_pieces(rows: list[Row], tokenizer: Tokenizer) -> Iterator[list[NDArray[np.int64]]]:
    encoded: dict[bool, Iterator[NDArray[np.int64]]] = {}
    for chat in (False, True):
        texts = [piece.text for row in rows if row.chat == chat for piece in row.pieces]
        encoded[chat] = iter(tokenizer.encode_batch(texts, parse_special=chat))
    for row in rows:
        yield [next(encoded[row.chat]) for _ in row.pieces]


def _with_one_bos(
    ids: NDArray[np.uint32], learned: NDArray[np.bool_], bos: int | None, wanted: bool
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """A row that begins with one BOS if it is wanted or the chat template put any, else with none."""
    if bos is None:
        return ids, learned
    is_bos = ids == bos
    leading = len(ids) if is_bos.all() else int(np.argmin(is_bos))
    if not leading and not wanted:
        return ids, learned
    first = np.array([bos], np.uint32), np.zeros(1, np.bool_)
    return np.concatenate([first[0], ids[leading:]]), np.concatenate([first[1], learned[leading:]])


def _bos(tokenizer: Tokenizer) -> int | None:
    """The id of the tokenizer's BOS, whether or not it puts one itself."""
    token = token_text(read_settings(tokenizer.folder).get("bos_token"))
    found = tokenizer.reference.token_to_id(token) if token else None
    return tokenizer.bos_id if found is None else int(found)
