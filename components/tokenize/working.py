"""Units of work done by one process or by many, with the same output; a line of progress every few seconds.

Workers are processes with one encoder thread each, so that as many run as there are CPUs; a single worker is this
process, whose encoder uses every CPU.
"""

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstrain.components.core import telemetry
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.tokenizer import Engine, Tokenizer, load_tokenizer
from crosstrain.components.core.workers import CONTEXT, share_work
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.encoding import Report, write_part
from crosstrain.components.tokenize.reading import Reader, Unit
from crosstrain.components.tokenize.tally import Counts, Tally

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0

QUARANTINE, SIZE = ".quarantine.jsonl", ".size"

SUFFIXES = (".bin", ".idx", ".hash", QUARANTINE, SIZE)
"""What a part may consist of; the last two only where they are needed."""


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    config: Config
    tokenizer: Path
    """Folder of the tokenizer."""
    engine: Engine
    """Encoder that was chosen: not `auto`."""
    scratch: Path
    """Where parts are written before they are stored."""


@dataclass(frozen=True)
class Done:
    """A finished unit: its part's files lie in the job's scratch folder."""

    unit: Unit
    counts: Counts
    fields: frozenset[str]
    """Fields met in records without text."""


class Worker:
    """Does units; one to a process."""

    def __init__(self, job: Job, corpus: Artifact, tokenizer: Tokenizer, report: Report) -> None:
        self._job = job
        self._reader = Reader(corpus, job.config)
        self._tokenizer = tokenizer
        self._report = report

    def do(self, unit: Unit) -> Done:
        """Tokenize one unit into its part."""
        stem = self._job.scratch / unit.stem
        for suffix in SUFFIXES:
            stem.with_name(stem.name + suffix).unlink(missing_ok=True)
        tally = Tally(self._job.config.on_invalid, stem.with_name(stem.name + QUARANTINE))
        texts = self._reader.documents(unit, tally)
        counts = write_part(texts, stem, self._tokenizer, self._job.config, tally, self._report)
        return Done(unit, counts, frozenset(tally.fields))


class Progress:
    """Sums what workers report, and says so every few seconds."""

    def __init__(self, units: int, finished: int) -> None:
        self.documents = 0
        self.tokens = 0
        self.finished = finished
        self._units = units
        self._began = self._said = time.monotonic()

    def add(self, documents: int, tokens: int) -> None:
        """Count what a batch came to."""
        self.documents += documents
        self.tokens += tokens
        self.say()

    def say(self) -> None:
        """Print a line, unless the last one is fresh."""
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS:
            return
        self._said = now
        log.info(
            "tokenize: %d documents, %d tokens, %.0f tokens/s, %d of %d units",
            *(self.documents, self.tokens, self.rate(), self.finished, self._units),
        )
        telemetry.emit("progress", documents=self.documents, tokens=self.tokens, tokens_per_second=self.rate())

    def rate(self) -> float:
        """Tokens a second since the start."""
        return self.tokens / max(time.monotonic() - self._began, 1e-9)


def do_units(
    job: Job, corpus: Artifact, tokenizer: Tokenizer, units: list[Unit], workers: int, progress: Progress
) -> Iterator[Done]:
    """Do units by `workers` processes and hand them out as they finish, in any order.

    A single worker uses `corpus` and `tokenizer`; others open their own.

    Raises:
        ValueError: a document is invalid; of several the one in the earliest unit that was met.
        ChildProcessError: a worker died.
    """
    if workers == 1:
        worker = Worker(job, corpus, tokenizer, progress.add)
        for unit in units:
            done = worker.do(unit)
            progress.finished += 1
            yield done
        return
    sums = CONTEXT.Array("q", 2)

    def tick() -> None:
        progress.documents, progress.tokens = sums[0], sums[1]
        progress.say()

    for done in share_work(workers, _start_worker, (job, sums), _do, units, tick):
        progress.finished += 1
        yield done


_worker: Worker


def _start_worker(job: Job, sums: Any) -> None:
    """Set up a worker process."""
    global _worker
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def report(documents: int, tokens: int) -> None:
        with sums.get_lock():
            sums[0] += documents
            sums[1] += tokens

    corpus = Artifact.open(job.config.corpus, "corpus")
    _worker = Worker(job, corpus, load_tokenizer(job.tokenizer, engine=job.engine, proven=True), report)


def _do(unit: Unit) -> Done:
    return _worker.do(unit)
