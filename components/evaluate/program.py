"""The program of evaluate: check that the inputs fit, run both models, compare, write the artifact.

Baseline and candidate are loaded one after the other, so that memory holds one model. Everything that is
written is the same for the same work on the same kind of device.
"""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.data import ShardDataset
from crosstrain.components.core.device import choose_device
from crosstrain.components.core.manifest import EvaluationFacts, ModelFacts, ShardsFacts
from crosstrain.components.core.model import TOKENIZER_FOLDER, load_model
from crosstrain.components.core.step import Result
from crosstrain.components.core.tokenizer import Tokenizer, load_tokenizer
from crosstrain.components.core.unigram import count_labels, unigram_loss
from crosstrain.components.evaluate.config import Config
from crosstrain.components.evaluate.costs import read_costs
from crosstrain.components.evaluate.curves import read_curves
from crosstrain.components.evaluate.generations import Prompt, choose_prompts, continue_prompts
from crosstrain.components.evaluate.losses import (
    HeldOut,
    Pieces,
    group,
    score,
    token_bytes,
)
from crosstrain.components.evaluate.outcome import Generation, Outcome, SetOutcome
from crosstrain.components.evaluate.page import render_markdown, render_page
from crosstrain.components.evaluate.statistics import choose_unit, compare

log = logging.getLogger(__name__)

KINDS = {"candidate": "model", "baseline": "model", "data": "shards", "forgetting": "shards", "adapter": "adapter"}
MODELS, SETS = ("baseline", "candidate"), ("data", "forgetting")

ByModel = dict[str, Pieces]
Inputs = Mapping[str, Artifact]


def run(config: Config) -> Result:
    """Evaluate a candidate model against a baseline.

    Raises:
        FileNotFoundError: an input is missing.
        PermissionError: the output cannot be written.
        ValueError: the inputs do not fit each other, a model gives losses that are not numbers, or the verdict is
            fail and require_pass is set; in this last case the output is written.
    """
    started = time.perf_counter()
    inputs = {name: Artifact.open(getattr(config, name), kind) for name, kind in KINDS.items() if getattr(config, name)}
    check_inputs(inputs, config)
    device = choose_device(config.device)
    curves = read_curves({name: inputs[name] for name in (*MODELS, "adapter") if name in inputs})
    with ArtifactWriter(config.output) as out:
        outcome, pieces = measure(inputs, config, device)
        page = render_page(outcome, curves, inputs, config.options())
        _write_files(out, outcome, pieces, page)
        facts = EvaluationFacts(
            verdict=outcome.verdict,
            finding=outcome.finding,
            unit=outcome.data.comparison.unit,
            device=outcome.device,
            dtype=outcome.dtype,
            metrics=outcome.metrics(),
        )
        artifact = out.commit("evaluate", facts, config.options(), inputs)
    told = " ".join(outcome.sentences())
    log.info("verdict %s: %s", outcome.verdict, told)
    if config.require_pass and not outcome.passed:
        raise ValueError(f"verdict fail: {told} The report is at {artifact.files.locate('report.html')}")
    seconds = time.perf_counter() - started
    metrics = {**outcome.headline(), "tokens_per_second": 2 * outcome.tokens / seconds}
    costs = read_costs(inputs)
    html = render_page(outcome, curves, inputs, config.options(), costs)
    return Result(artifact, metrics, html, render_markdown(outcome, costs))


def check_inputs(inputs: Inputs, config: Config) -> None:
    """Refuse what does not fit, by manifests alone.

    Raises:
        ValueError: a model and shards of different tokenizers, samples longer than a model takes, or too little
            held-out data for an interval.
    """
    for data in (inputs[name] for name in SETS if name in inputs):
        shards: ShardsFacts = data.facts
        choose_unit(
            min(shards.validation.documents, config.max_documents or shards.validation.documents),
            min(shards.validation.samples, config.max_samples or shards.validation.samples),
        )
        for role in MODELS:
            _check_fit(role, inputs[role], data)


def _check_fit(role: str, model: Artifact, data: Artifact) -> None:
    facts: ModelFacts = model.facts
    shards: ShardsFacts = data.facts
    if facts.tokenizer_sha256 != shards.tokenizer.sha256:
        theirs = f"{facts.tokenizer_sha256[:12]}…" if facts.tokenizer_sha256 else "none"
        raise ValueError(
            f"{model.uri}: the {role} model's tokenizer is {theirs}, and {data.uri} was made with "
            f"{shards.tokenizer.sha256[:12]}…, so that ids mean different text; tokenize the text again with the "
            "model's tokenizer"
        )
    if facts.vocab_size < shards.tokenizer.vocab_size:
        raise ValueError(
            f"{model.uri}: the {role} model has {facts.vocab_size} token embeddings, and the tokenizer of {data.uri} "
            f"has {shards.tokenizer.vocab_size} ids; resize the model's embeddings"
        )
    if facts.max_sequence_length < shards.sequence_length:
        raise ValueError(
            f"{model.uri}: the {role} model takes {facts.max_sequence_length} tokens at most, and {data.uri} holds "
            f"samples of {shards.sequence_length}; shard the text again with a smaller sequence_length"
        )


def measure(inputs: Inputs, config: Config, device: torch.device) -> tuple[Outcome, dict[str, ByModel]]:
    """Run both models over the held-out sets: what was found, and the pieces by set and model behind it."""
    bounds = {"max_samples": config.max_samples, "max_documents": config.max_documents}
    held_out = {name: HeldOut(ShardDataset(inputs[name], "validation"), **bounds) for name in SETS if name in inputs}
    tokenizer = load_tokenizer(inputs["data"].fetch_all(TOKENIZER_FOLDER), engine="tokenizers")
    half = held_out["data"].samples.sequence_length // 2
    prompt_tokens, generated_tokens = min(config.prompt_tokens, half), min(config.generated_tokens, half)
    prompts = choose_prompts(held_out["data"], config.prompts, prompt_tokens, generated_tokens, tokenizer.eos_id)
    pieces: dict[str, ByModel] = {name: {} for name in held_out}
    written: dict[str, list[NDArray[np.int64]]] = {}
    for role in MODELS:
        model = load_model(inputs[role], device=str(device))
        for name, held in held_out.items():
            where = f"the {role} model at {inputs[role].uri}, on {name}"
            pieces[name][role] = score(model, held, config.batch_tokens, where)
        written[role] = continue_prompts(model, prompts, generated_tokens, tokenizer.eos_id)
        del model  # before the next one is loaded
    sets = {name: _summarize(inputs[name], held_out[name], tokenizer, pieces[name], config) for name in held_out}
    outcome = Outcome(
        data=sets["data"],
        forgetting=sets.get("forgetting"),
        margin=config.margin,
        max_forgetting=config.max_forgetting,
        generations=_generations(tokenizer, prompts, written),
        device="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype="float32",
    )
    return outcome, pieces


def _summarize(
    shards: Artifact, held_out: HeldOut, tokenizer: Tokenizer, pieces: ByModel, config: Config
) -> SetOutcome:
    wanted = count_labels((sample for _, sample, _ in held_out), tokenizer.vocab_size)
    lengths = token_bytes(tokenizer)
    return SetOutcome(
        comparison=compare(pieces["baseline"], pieces["candidate"], config.resamples, config.seed),
        unigram_entropy=unigram_loss(ShardDataset(shards, "train"), wanted, config.unigram_tokens),
        text_bytes=None if lengths is None else int((wanted * lengths).sum()),
        shards_sha256=shards.manifest.sha256,
    )


def _generations(
    tokenizer: Tokenizer, prompts: list[Prompt], written: Mapping[str, list[NDArray[np.int64]]]
) -> list[Generation]:
    rows = zip(prompts, written["baseline"], written["candidate"], strict=True)
    return [
        Generation(prompt.document, *(tokenizer.decode(ids) for ids in (prompt.ids, prompt.truth, baseline, candidate)))
        for prompt, baseline, candidate in rows
    ]


def _write_files(out: ArtifactWriter, outcome: Outcome, pieces: Mapping[str, ByModel], html: str) -> None:
    with out.create("report.html") as path:
        path.write_text(html, encoding="utf-8")
    with out.create("metrics.json") as path:
        path.write_text(json.dumps(outcome.record(), indent=2, sort_keys=True, allow_nan=False) + "\n")
    with out.create("per_document.jsonl") as path:
        path.write_text("".join(_line(row) for name, models in pieces.items() for row in _by_document(name, models)))
    with out.create("generations.jsonl") as path:
        path.write_text("".join(_line(vars(generation)) for generation in outcome.generations), encoding="utf-8")


def _by_document(name: str, models: ByModel) -> list[dict[str, Any]]:
    """Mean loss (nats/token) of each document under both models."""
    baseline, candidate = models["baseline"], models["candidate"]
    columns = group(baseline.document, baseline.tokens, baseline.loss, candidate.loss)
    return [
        {"set": name, "document": int(d), "tokens": int(n), "baseline_loss": b / n, "candidate_loss": c / n}
        for d, n, b, c in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
