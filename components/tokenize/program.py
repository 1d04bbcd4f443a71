"""Corpus to token documents: plan units, choose tokenizer and encoder, do the units, write one manifest.

What is read how, is in reading.py; what a part is, in encoding.py; who does the work, in working.py.
"""

import logging
from pathlib import Path
from typing import NamedTuple

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import File, TokensFacts
from crosstrain.components.core.step import Result
from crosstrain.components.core.tokenizer import Tokenizer, load_tokenizer
from crosstrain.components.core.tokens import token_dtype
from crosstrain.components.core.unit_records import FOLDER, UnitRecords, work_key
from crosstrain.components.core.workers import available_cpus, count_workers
from crosstrain.components.tokenize.config import Config
from crosstrain.components.tokenize.deduplicating import PAIR, Parts, drop_documents, find_duplicates
from crosstrain.components.tokenize.planned import planned_sources
from crosstrain.components.tokenize.preparing import prepare_tokenizer, probe_texts
from crosstrain.components.tokenize.reading import Unit, plan_units
from crosstrain.components.tokenize.tally import Counts
from crosstrain.components.tokenize.working import (
    QUARANTINE,
    SIZE,
    SUFFIXES,
    Done,
    Job,
    Progress,
    do_units,
)

log = logging.getLogger(__name__)


class Finished(NamedTuple):
    """What one partition comes to, documents and tokens before duplicates are taken out."""

    units: int
    documents: int
    tokens: int
    tokens_per_second: float


def run_partition(config: Config, partition: int, partitions: int) -> Finished:
    """Do every `partitions`-th unit from `partition` on, and leave parts and records at the output for `run`.

    Any number of processes, on any machines, may do different partitions of one output at once; `run` with the same
    options and output then takes over what they finished, does what is missing, and writes the one manifest, the same
    bytes as without partitions. Give a tokenizer, or a plan: otherwise each partition trains the same one.

    Raises:
        ValueError: as `run`, or there is no such partition.
    """
    if not 0 <= partition < partitions:
        raise ValueError(f"partition {partition} of {partitions}: give one from 0 to {partitions - 1}")
    with ArtifactWriter(config.output) as out:
        work = _Work(config, out, replaces=False)
        mine = work.units[partition::partitions]
        rate = work.do([unit for unit in mine if unit.index not in work.counts])
        counts = [work.counts[unit.index] for unit in mine]
        return Finished(len(mine), sum(one.documents for one in counts), sum(one.tokens for one in counts), rate)


def run(config: Config) -> Result:
    """Tokenize a corpus.

    Raises:
        FileNotFoundError: the corpus, or the tokenizer, is not there.
        ValueError: a document or a file is invalid, EOS is not in the vocabulary, or no document has any text.
    """
    with ArtifactWriter(config.output) as out:
        work = _Work(config, out)
        rate = work.do([unit for unit in work.units if unit.index not in work.counts])
        if config.deduplicate:
            _deduplicate(work.units, out, work.records, work.counts)
        total = Counts()
        for unit in work.units:
            total.add(work.counts[unit.index])
        if not total.documents:
            raise ValueError(
                f"{config.corpus}: nothing to tokenize: {_why_none(total, config.text_field, work.fields)}"
            )
        out.add_folder(work.folder, "tokenizer/")
        facts = TokensFacts(
            tokenizer=work.tokenizer.facts(),
            dtype="uint16" if token_dtype(work.tokenizer.vocab_size) == "uint16" else "int32",
            parts=tuple(unit.stem for unit in work.units if work.counts[unit.index].documents),
            engine=work.tokenizer.engine,
            **total.values(),
        )
        artifact = out.commit("tokenize", facts, config.options(), work.sources)
        work.records.clear()
    return Result(artifact, _metrics(total, work.tokenizer, rate))


class _Work:
    """One piece of work at its output: the units, the tokenizer, and what an earlier or another run finished."""

    def __init__(self, config: Config, out: ArtifactWriter, replaces: bool = True) -> None:
        corpus = Artifact.open(config.corpus, "corpus")
        self.units = plan_units(corpus.manifest, config.unit_bytes)
        self.inputs = {"corpus": corpus}
        if config.tokenizer:
            self.inputs["tokenizer"] = Artifact.open(config.tokenizer)
        self.sources = planned_sources(self.inputs)
        self._config, self._out = config, out
        self.folder = out.staging / "tokenizer"
        prepare_tokenizer(config, corpus, self.units, self.folder)
        probe = probe_texts(config, corpus, self.units)
        name = config.tokenizer or config.tokenizer_uri
        self.tokenizer = load_tokenizer(self.folder, probe, config.engine, name=name)
        key = {
            "options": config.options(),
            "inputs": {name: item.sha256 for name, item in self.sources.items()},
            "tokenizer": self.tokenizer.facts().model_dump(),
            "engine": self.tokenizer.engine,
        }
        self.records = UnitRecords(out, work_key(key))
        stems = {unit.stem: unit.index for unit in self.units}
        notes = self.records.load(stems, replaces)
        self.counts = {index: Counts(**notes[stem]) for stem, index in stems.items() if stem in notes}
        self.fields: set[str] = set()
        if self.counts:
            log.info("%d of %d units were finished before", len(self.counts), len(self.units))

    def do(self, missing: list[Unit]) -> float:
        """Do some units, store their parts and note them as finished; tokens a second."""
        progress = Progress(len(self.units), finished=len(self.counts))
        scratch = self._out.staging / "parts"
        scratch.mkdir()
        job = Job(self._config, self.folder, self.tokenizer.encoder, scratch)
        workers = count_workers(self._config.workers or _default_workers(), len(missing))
        for done in do_units(job, self.inputs["corpus"], self.tokenizer, missing, workers, progress):
            self.counts[done.unit.index] = done.counts
            self.records.save(done.unit.stem, done.counts.values(), _store(self._out, done, scratch))
            self.fields |= done.fields
        return progress.rate()


def _default_workers() -> int:
    """One process uses two CPUs as well as two do, and starts once."""
    cpus = available_cpus()
    return cpus if cpus > 2 else 1


def _store(out: ArtifactWriter, done: Done, scratch: Path) -> list[File]:
    """Store what a unit's part consists of; the sizes lie with the records, for deduplication alone."""
    files = []
    for suffix in SUFFIXES:
        local = scratch / f"{done.unit.stem}{suffix}"
        if not local.is_file():
            continue
        if suffix == SIZE:
            out.store.upload(local, f"{FOLDER}/{done.unit.stem}{SIZE}")
        elif suffix == QUARANTINE or done.counts.documents:
            files.append(out.add(local, local.name))
        local.unlink(missing_ok=True)
    return files


def _deduplicate(units: list[Unit], out: ArtifactWriter, records: UnitRecords, counts: dict[int, Counts]) -> None:
    """Take documents that came before out of the finished parts; done again it finds nothing more."""
    parts = Parts(out.store, out.staging / "fetched")
    owners = {unit.stem: unit for unit in units if counts[unit.index].documents}
    for stem, positions in find_duplicates(parts, list(owners)).items():
        unit = owners[stem]
        records.forget(stem)
        target = out.staging / "kept" / stem
        target.parent.mkdir(exist_ok=True)
        sizes = f"{FOLDER}/{stem}{SIZE}"
        counts[unit.index].drop(drop_documents(parts, stem, sizes, positions, target))
        for suffix in PAIR:
            if counts[unit.index].documents:
                out.add(target.with_name(stem + suffix), stem + suffix)
            else:
                out.discard(stem + suffix)
        records.save(stem, counts[unit.index].values(), [file for file in out.files if file.path.startswith(stem)])


def _why_none(total: Counts, text_field: str, fields: set[str]) -> str:
    """What became of the documents of a corpus that gave none."""
    text = f"{total.read} read, {total.empty} empty, {total.null} without text, {total.quarantined} set aside"
    if total.null:
        text += f"; no text in field {text_field!r}: set text_field to one of {', '.join(sorted(fields))}"
    return text


def _metrics(total: Counts, tokenizer: Tokenizer, rate: float) -> dict[str, float]:
    counts = {name: float(value) for name, value in total.values().items()}
    return counts | {
        "tokens_per_second": rate,
        "bytes_per_token": total.text_bytes / total.tokens,
        "vocab_size": tokenizer.vocab_size,
    }
