"""Merge an adapter into its base model, prove it, and only then let it exist.

Order: configurations and headers first, so that a mismatch costs seconds; then the weights, tensor by tensor;
then the proof on the files as written; then the manifest. The base's shards, index, configuration, generation
configuration, tokenizer and chat template are kept; what the adapter brings itself (a tokenizer with new tokens)
takes their place.
"""

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import ModelFacts
from crosstrain.components.core.peft_adapter import read_adapter
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import LocalStore, Store
from crosstrain.components.core.telemetry import peak_rss_bytes
from crosstrain.components.core.tokenizer import TOKENIZER_FILE
from crosstrain.components.core.weights import INDEX_NAME, model_tensors, read_header, write_file
from crosstrain.components.merge.arithmetic import merged_bytes
from crosstrain.components.merge.config import Config
from crosstrain.components.merge.plan import Plan, Weighted, plan_merge
from crosstrain.components.merge.proof import Model, Proof, prove

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_OWN = ("config.json", INDEX_NAME, "training_log.jsonl")
"""Files of the base that are written anew, or that tell of the base's own training."""


def run(config: Config) -> Result:
    """Merge, prove and commit.

    Raises:
        ValueError: the adapter is of another base, does not fit it, is of a kind that cannot be merged, gives
            values that are not finite, or the proof fails.
    """
    started = time.perf_counter()
    base = Artifact.open(config.model, "model")
    tuned = [Artifact.open(uri, "adapter") for uri in (config.adapter, *config.more_adapters)]
    for one in tuned:
        if config.check_base and one.facts.base_sha256 != base.manifest.sha256:
            raise ValueError(
                f"{one.uri}: trained on the model {one.facts.base_sha256[:12]}…, and {config.model} is "
                f"{base.manifest.sha256[:12]}…; give that model, or set check_base=false if its weights are the same"
            )
    shares = config.weights or (1.0,) * len(tuned)
    folders = [one.fetch_all() for one in tuned]
    adapters = [Weighted(read_adapter(LocalStore(at)), weight) for at, weight in zip(folders, shares, strict=True)]
    tokens = _tokenizer_of(base, tuned)
    plan = plan_merge(
        model_tensors(base.files),
        adapters,
        tied=base.facts.tied_embeddings,
        untie=config.tied_embeddings == "untie",
        max_shard_bytes=config.max_shard_bytes,
        vocab_size=_ids(tokens) if config.trim_vocabulary else 0,
    )
    with ArtifactWriter(config.output) as out:
        weights = LocalStore(base.fetch_all())
        written = _write_weights(out, plan, weights)
        seconds = time.perf_counter() - started
        settings = _write_side_files(out, plan, base, tokens)
        log.info("%d tensors merged, %d copied in %.1f s; proving", *_counts(plan), seconds)
        # The reference's vocabulary is the merged one, untrimmed: where it was resized, peft puts the adapter's own in.
        before = json.loads(base.read("config.json")) | {"vocab_size": plan.vocab_size}
        reference = Model(before, weights, model_tensors(weights), tuple(zip(folders, shares, strict=True)))
        proof = _prove(out, plan, settings, reference, tokens, config.tolerance)
        log.info(
            "proof: logits differ by %.3g, rounding explains %.3g",
            proof.max_abs_logit_difference,
            proof.rounding_logit_difference,
        )
        proof.check()
        facts = _facts(base, tuned, plan, settings, tokens)
        more = {f"more_adapters_{number}": one for number, one in enumerate(tuned[1:])}
        artifact = out.commit("merge", facts, config.options(), {"model": base, "adapter": tuned[0], **more})
    merged, copied = _counts(plan)
    return Result(
        artifact,
        {
            "parameters": facts.parameters,
            "merged_tensors": merged,
            "copied_tensors": copied,
            "bytes_written": written,
            "bytes_per_second": written / seconds,
            "max_abs_logit_difference": proof.max_abs_logit_difference,
            "rounding_logit_difference": proof.rounding_logit_difference,
            "mean_kl": proof.mean_kl,
            "argmax_agreement": proof.argmax_agreement,
            "peak_rss_bytes": peak_rss_bytes(),
        },
    )


def _write_weights(out: ArtifactWriter, plan: Plan, base: Store) -> int:
    """Write every safetensors file and the index; the bytes of all tensors."""
    headers = {edit.source.file for edit in plan.edits if edit.store is None}
    metadata: dict[str, str] = {}
    for file in sorted(headers, reverse=True):
        metadata |= read_header(base, file)[1]
    for file, edits in plan.files.items():
        with out.create(file) as path:
            targets = [edit.target for edit in edits]
            write_file(path, targets, {**metadata, "format": "pt"}, merged_bytes(edits, base))
    total = sum(edit.target.bytes for edit in plan.edits)
    if len(plan.files) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {edit.target.name: edit.target.file for edit in plan.edits},
        }
        _write(out, INDEX_NAME, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    else:
        out.store.delete(INDEX_NAME)  # one that an earlier, failed try left would hide model.safetensors
    return total


def _write_side_files(out: ArtifactWriter, plan: Plan, base: Artifact, tokens: Artifact) -> dict[str, Any]:
    """Write config.json (byte for byte the base's unless the plan changes it) and all other files; its settings."""
    text = base.read("config.json")
    settings: dict[str, Any] = json.loads(text)
    if plan.settings:
        settings |= plan.settings
        text = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
    _write(out, "config.json", text)
    from_adapter = {file.path for file in tokens.manifest.files if file.path in TOKENIZER_FILES and tokens is not base}
    for file in base.manifest.files:
        if not file.path.endswith(".safetensors") and file.path not in {*_OWN, *from_adapter}:
            _write(out, file.path, base.read(file.path))
    for path in sorted(from_adapter):
        _write(out, path, tokens.read(path))
    return settings


def _write(out: ArtifactWriter, path: str, data: bytes) -> None:
    with out.create(path) as local:
        local.write_bytes(data)


def _prove(
    out: ArtifactWriter, plan: Plan, settings: dict[str, Any], reference: Model, tokens: Artifact, tolerance: float
) -> Proof:
    merged = Model(settings, out.store, model_tensors(out.store))
    tokenizer = tokens.fetch(TOKENIZER_FILE) if TOKENIZER_FILE in tokens.manifest.by_path else None
    rounded = {edit.target.name for edit in plan.edits if not edit.copied}
    return prove(reference, merged, rounded, tokenizer, tolerance)


def _tokenizer_of(base: Artifact, adapters: Sequence[Artifact]) -> Artifact:
    """Whose tokenizer the merged model has: the adapter's that brings one, else the base's.

    Raises:
        ValueError: two adapters bring different ones.
    """
    found = [one for one in adapters if TOKENIZER_FILE in one.manifest.by_path]
    if len({one.manifest.file(TOKENIZER_FILE).sha256 for one in found}) > 1:
        raise ValueError(f"{found[1].uri}: brings another tokenizer than {found[0].uri}; their ids mean different text")
    return found[0] if found else base


def _ids(tokens: Artifact) -> int:
    """Number of ids of a tokenizer.

    Raises:
        ValueError: there is none.
    """
    if TOKENIZER_FILE not in tokens.manifest.by_path:
        raise ValueError(f"{tokens.uri}: no {TOKENIZER_FILE}, so there is nothing to trim the vocabulary to")
    vocabulary = Tokenizer.from_file(str(tokens.fetch(TOKENIZER_FILE))).get_vocab(with_added_tokens=True)
    return max(vocabulary.values()) + 1


def _counts(plan: Plan) -> tuple[int, int]:
    copied = sum(edit.copied for edit in plan.edits)
    return len(plan.edits) - copied, copied


def _facts(
    base: Artifact, adapters: Sequence[Artifact], plan: Plan, settings: dict[str, Any], tokens: Artifact
) -> ModelFacts:
    tokenizer = tokens.manifest.by_path.get(TOKENIZER_FILE)
    facts: ModelFacts = base.facts
    return ModelFacts(
        architecture=facts.architecture,
        parameters=sum(edit.target.numel for edit in plan.edits),
        dtype=facts.dtype,
        vocab_size=settings["vocab_size"],
        max_sequence_length=facts.max_sequence_length,
        tied_embeddings=facts.tied_embeddings and plan.settings.get("tie_word_embeddings", True),
        tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
        precision="merged",
        tokens_seen=sum(one.facts.tokens_seen for one in adapters),
    )
