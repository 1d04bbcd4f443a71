"""An artifact's manifest: what a heavy output is, told in a small JSON file that is written last.

The manifest lists every object of the output with size and SHA-256, the facts of its kind, the options it
was made with and the manifests it was made from. It holds no time, host or path of its own, so that the
same work gives the same bytes anywhere, and its SHA-256 names the content. Left out on purpose: where the
bytes lie (a manifest describes the prefix it is found in; `base` is set only by imports that leave the
user's files where they are).
"""

import hashlib
import json
import math
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from crosstrain.components.core.storage import check_key

SCHEMA_VERSION: Literal[1] = 1
MANIFEST_NAME = "manifest.json"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # so that encoding refuses them in options, where null would be written
    )


class File(_Strict):
    """One object of an artifact."""

    path: str
    """Key relative to the artifact's prefix (or to `base`)."""
    bytes: Count
    sha256: Sha256

    @model_validator(mode="after")
    def _inside(self) -> Self:
        check_key(self.path)
        return self


class Source(_Strict):
    """A manifest that this one was made from."""

    kind: str
    sha256: Sha256


class CorpusFacts(_Strict):
    """Raw documents, as a user gave them."""

    kind: Literal["corpus"] = "corpus"
    format: Literal["jsonl", "parquet", "text"]


class TokenizerFacts(_Strict):
    """The tokenizer that token ids belong to; its files lie under `tokenizer/`."""

    sha256: Sha256
    """SHA-256 of tokenizer.json."""
    vocab_size: Count
    """Number of ids, added tokens included."""
    bos_id: int | None
    """Id put before each document, None where the tokenizer wants none."""
    eos_id: int
    """Id put after each document."""


class TokensFacts(_Strict):
    """Token documents: Megatron `.bin`/`.idx` pairs, one document a sequence."""

    kind: Literal["tokens"] = "tokens"
    tokenizer: TokenizerFacts
    dtype: Literal["uint16", "int32"]
    parts: tuple[str, ...]
    """Stems of the pairs in order: `part-00000` names `part-00000.bin`, `.idx` and `.hash`."""
    documents: Count
    tokens: Count
    """Ids in all `.bin` files, BOS and EOS included."""
    text_bytes: Count
    """UTF-8 bytes of the tokenized documents."""
    read: Count
    """Documents met in the input: `documents` plus the four counts below."""
    empty: Count
    null: Count
    """Records whose text field is missing, null or not text."""
    quarantined: Count
    """Documents set aside as undecodable."""
    duplicates: Count
    engine: str
    """Encoder and its version."""


class PlanFacts(_Strict):
    """Work on a corpus that several partitions will do; the tokenizer they share lies under `tokenizer/`."""

    kind: Literal["plan"] = "plan"
    tokenizer: TokenizerFacts
    units: Count
    """Units of work in all."""
    partitions: Count
    """Partition i of n does every n-th unit from the i-th on."""


class PartitionFacts(_Strict):
    """One partition's work is done; what it made lies with the plan."""

    kind: Literal["partition"] = "partition"
    partition: Count
    partitions: Count
    units: Count
    documents: Count
    tokens: Count
    """As tokenized, before duplicates are taken out."""


class Split(_Strict):
    """The shards of one split, in order."""

    shards: tuple[str, ...]
    """Stems of the `.bin`/`.idx` pairs."""
    shard_tokens: tuple[Count, ...]
    """Ids in each shard."""
    continues: tuple[bool, ...]
    """Whether a shard's first document began in the shard before it."""
    documents: Count
    tokens: Count
    samples: Count
    """Samples of sequence_length ids; the last one of the split may be short."""


class ShardsFacts(_Strict):
    """Packed training shards, split into train and validation."""

    kind: Literal["shards"] = "shards"
    tokenizer: TokenizerFacts
    dtype: Literal["uint16", "int32"]
    sequence_length: Count
    train: Split
    validation: Split


class ModelFacts(_Strict):
    """A plain Hugging Face model folder."""

    kind: Literal["model"] = "model"
    architecture: str
    """Class name in transformers: LlamaForCausalLM."""
    parameters: Count
    dtype: str
    vocab_size: Count
    max_sequence_length: Count
    tied_embeddings: bool
    tokenizer_sha256: Sha256 | None
    precision: str
    """How it was made: `bf16`, `fp32`, `fp8-torchao-emulated`, `imported`, `merged`…: what ran, not what was asked."""
    steps: Count = 0
    tokens_seen: Count = 0
    train_loss: float | None = None
    """Mean training loss of the last logged step, nats a token."""
    guard_events: tuple[dict[str, Any], ...] = ()
    """What the divergence guard did and why, in order."""


class AdapterFacts(_Strict):
    """A standard peft adapter folder."""

    kind: Literal["adapter"] = "adapter"
    method: Literal["lora", "dora"]
    rank: Count
    alpha: float
    target_modules: tuple[str, ...]
    trainable_parameters: Count
    base_parameters: Count
    base_sha256: Sha256
    """SHA-256 of the base model's manifest."""
    steps: Count
    tokens_seen: Count
    train_loss: float | None = None
    rows: Count = 0
    """Prompt/completion rows trained on; 0 when trained on shards."""
    rows_dropped: Count = 0
    """Rows in which truncation or masking left no label."""


class CheckpointFacts(_Strict):
    """Everything a run needs to go on at `step` as if it had never stopped."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: Count
    """Optimizer steps done."""
    run_key: Sha256
    """What the run is: hash of options and input manifests."""
    train_loss: float | None = None


class EvaluationFacts(_Strict):
    """A candidate model measured against a baseline on held-out data; the report lies beside."""

    kind: Literal["evaluation"] = "evaluation"
    verdict: Literal["pass", "fail"]
    finding: Literal["identical", "significantly better", "significantly worse", "no significant difference"]
    """What the candidate is beside the baseline, whatever the margin."""
    unit: Literal["document", "sample"]
    """What was resampled for the intervals."""
    device: str
    """What it ran on: `CPU`, or the accelerator's name."""
    dtype: str
    """Data type of weights and arithmetic during the evaluation."""
    metrics: dict[str, float]
    """Finite numbers only; names as KFP shows them."""


class PreflightFacts(_Strict):
    """A run that was checked before it began, without errors; what was found besides is in run.json."""

    kind: Literal["preflight"] = "preflight"
    checks: tuple[str, ...]
    """Names of the checks."""


class ComparisonFacts(_Strict):
    """Two arms of a study, compared run by run; comparison.json holds the losses by seed."""

    kind: Literal["comparison"] = "comparison"
    study: Literal["fp8", "lora"]
    verdict: Literal["equivalent", "different", "undecided"]
    control: str
    """What the control arm ran as."""
    candidate: str
    seeds: tuple[Count, ...]
    metrics: dict[str, float]
    """Finite numbers only, none of which depends on the machine."""


Facts = Annotated[
    CorpusFacts
    | TokensFacts
    | PlanFacts
    | PartitionFacts
    | ShardsFacts
    | ModelFacts
    | AdapterFacts
    | CheckpointFacts
    | EvaluationFacts
    | ComparisonFacts
    | PreflightFacts,
    Field(discriminator="kind"),
]


class Manifest(_Strict):
    """What an artifact is; see the module's docstring."""

    schema_version: Literal[1] = SCHEMA_VERSION
    component: str
    """The component that wrote it."""
    facts: Facts
    files: tuple[File, ...]
    options: dict[str, Any]
    """The component's options, defaults included."""
    inputs: dict[str, Source]
    """Input name to the manifest it was."""
    base: str = ""
    """URI prefix that `files` are relative to; empty: the prefix that holds the manifest."""

    _encoded: bytes = PrivateAttr(b"")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths) or MANIFEST_NAME in paths:
            raise ValueError("files repeat a path or list the manifest itself")
        try:
            text = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False)
        except ValueError:
            raise ValueError("a number is NaN or infinite") from None
        self._encoded = (text + "\n").encode()
        return self

    def encode(self) -> bytes:
        """The bytes it was read from, or canonical ones: sorted keys, two-space indent, final newline."""
        return self._encoded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())

    @property
    def sha256(self) -> str:
        """Name of the content: SHA-256 of the bytes that are stored, whatever this version would write.

        An import's `base` is blanked first, so that the same files at another place keep their name.
        """
        if not self.base:
            return hashlib.sha256(self.encode()).hexdigest()
        values = {**json.loads(self.encode()), "base": ""}
        return hashlib.sha256((json.dumps(values, indent=2, sort_keys=True) + "\n").encode()).hexdigest()

    @property
    def kind(self) -> str:
        return self.facts.kind

    def source(self) -> Source:
        """The manifest, as an input of another."""
        return Source(kind=self.kind, sha256=self.sha256)

    def file(self, path: str) -> File:
        """The entry for one path, or FileNotFoundError."""
        try:
            return self.by_path[path]
        except KeyError:
            raise FileNotFoundError(f"{path!r} is not in the {self.kind} manifest of {self.component}") from None

    @cached_property
    def by_path(self) -> dict[str, File]:
        """Path to entry."""
        return {file.path: file for file in self.files}


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest's bytes strictly; a ValueError names `where` and what does not fit."""
    try:
        manifest = Manifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "file"
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"{where}: not a crosstrain manifest of schema {SCHEMA_VERSION}: {name}: {message} "
            f"({error.error_count()} faults); was it written by another version, or is it another file?"
        ) from None
    manifest._encoded = data  # a field that a later version adds must not rename what is stored
    return manifest


def finite(values: dict[str, float]) -> dict[str, float]:
    """The values that are finite numbers: a metric that is not one is left out, never written as NaN."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
