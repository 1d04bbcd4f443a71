"""Merge an adapter into its base model, prove it, and only then let it exist.

Order: configurations and headers first, so that a mismatch costs seconds; then the weights, tensor by tensor;
then the proof on the files as written; then the manifest. The base's shards, index, configuration, generation
configuration, tokenizer and chat template are kept; what the adapter brings itself (a tokenizer with new tokens)
takes their place.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import ModelFacts
from crosstrain.components.core.peft_adapter import Adapter, read_adapter
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import LocalStore, Store
from crosstrain.components.core.telemetry import peak_rss_bytes
from crosstrain.components.core.weights import INDEX_NAME, model_tensors, read_header, write_file
from crosstrain.components.merge.arithmetic import merged_bytes
from crosstrain.components.merge.config import Config
from crosstrain.components.merge.plan import Plan, plan_merge
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
    base, tuned = Artifact.open(config.model, "model"), Artifact.open(config.adapter, "adapter")
    if config.check_base and tuned.facts.base_sha256 != base.manifest.sha256:
        raise ValueError(
            f"{config.adapter}: trained on the model {tuned.facts.base_sha256[:12]}…, and {config.model} is "
            f"{base.manifest.sha256[:12]}…; give that model, or set check_base=false if its weights are the same"
        )
    adapter = read_adapter(LocalStore(tuned.fetch_all()))
    plan = plan_merge(
        model_tensors(base.files),
        adapter,
        tied=base.facts.tied_embeddings,
        untie=config.tied_embeddings == "untie",
        max_shard_bytes=config.max_shard_bytes,
    )
    with ArtifactWriter(config.output) as out:
        weights = LocalStore(base.fetch_all())
        written = _write_weights(out, plan, weights, adapter)
        seconds = time.perf_counter() - started
        settings = _write_side_files(out, plan, base, tuned)
        log.info("%d tensors merged, %d copied in %.1f s; proving", *_counts(plan), seconds)
        proof = _prove(out, plan, settings, weights, base, tuned, config.tolerance)
        log.info(
            "proof: logits differ by %.3g, rounding explains %.3g",
            proof.max_abs_logit_difference,
            proof.rounding_logit_difference,
        )
        proof.check()
        facts = _facts(base, tuned, plan, settings)
        artifact = out.commit("merge", facts, config.options(), {"model": base, "adapter": tuned})
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


def _write_weights(out: ArtifactWriter, plan: Plan, base: Store, adapter: Adapter) -> int:
    """Write every safetensors file and the index; the bytes of all tensors."""
    headers = {edit.source.file for edit in plan.edits if not edit.from_adapter}
    metadata: dict[str, str] = {}
    for file in sorted(headers, reverse=True):
        metadata |= read_header(base, file)[1]
    for file, edits in plan.files.items():
        with out.create(file) as path:
            targets = [edit.target for edit in edits]
            write_file(path, targets, {**metadata, "format": "pt"}, merged_bytes(edits, base, adapter.store))
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


def _write_side_files(out: ArtifactWriter, plan: Plan, base: Artifact, adapter: Artifact) -> dict[str, Any]:
    """Write config.json (byte for byte the base's unless the plan changes it) and all other files; its settings."""
    text = base.read("config.json")
    settings: dict[str, Any] = json.loads(text)
    if plan.settings:
        settings |= plan.settings
        text = (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
    _write(out, "config.json", text)
    from_adapter = {file.path for file in adapter.manifest.files if file.path in TOKENIZER_FILES}
    for file in base.manifest.files:
        if not file.path.endswith(".safetensors") and file.path not in {*_OWN, *from_adapter}:
            _write(out, file.path, base.read(file.path))
    for path in sorted(from_adapter):
        _write(out, path, adapter.read(path))
    return settings


def _write(out: ArtifactWriter, path: str, data: bytes) -> None:
    with out.create(path) as local:
        local.write_bytes(data)


def _prove(
    out: ArtifactWriter,
    plan: Plan,
    settings: dict[str, Any],
    weights: Store,
    base: Artifact,
    adapter: Artifact,
    tolerance: float,
) -> Proof:
    # The vocabulary's size is the merged one: peft puts the adapter's own embeddings in where they were resized.
    before = json.loads(base.read("config.json")) | {"vocab_size": settings["vocab_size"]}
    reference = Model(before, weights, model_tensors(weights), adapter.fetch_all())
    merged = Model(settings, out.store, model_tensors(out.store))
    tokenizer = _tokenizer(base, adapter)
    rounded = {edit.target.name for edit in plan.edits if not edit.copied}
    return prove(reference, merged, rounded, tokenizer, tolerance)


def _tokenizer(base: Artifact, adapter: Artifact) -> Path | None:
    for artifact in (adapter, base):
        if any(file.path == "tokenizer.json" for file in artifact.manifest.files):
            return artifact.fetch("tokenizer.json")
    return None


def _counts(plan: Plan) -> tuple[int, int]:
    copied = sum(edit.copied for edit in plan.edits)
    return len(plan.edits) - copied, copied


def _facts(base: Artifact, adapter: Artifact, plan: Plan, settings: dict[str, Any]) -> ModelFacts:
    files = {file.path: file.sha256 for artifact in (base, adapter) for file in artifact.manifest.files}
    facts: ModelFacts = base.facts
    return ModelFacts(
        architecture=facts.architecture,
        parameters=sum(edit.target.numel for edit in plan.edits),
        dtype=facts.dtype,
        vocab_size=settings["vocab_size"],
        max_sequence_length=facts.max_sequence_length,
        tied_embeddings=facts.tied_embeddings and plan.settings.get("tie_word_embeddings", True),
        tokenizer_sha256=files.get("tokenizer.json"),
        precision="merged",
        tokens_seen=adapter.facts.tokens_seen,
    )
