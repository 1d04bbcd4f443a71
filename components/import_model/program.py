"""Take a Hugging Face folder in as a model artifact, by reference; a model of the hub is copied.

Facts come from config.json and the safetensors headers alone: no weight is loaded and torch is not imported.
What a later step could only trip over is refused here: weights that need pickle, missing shards, torn files,
quantised weights, architectures whose tensors are not stored one by one under their module's name.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from typing import Any

from crosstrain.components.core.artifact import Artifact, ArtifactWriter, commit_manifest, hash_file
from crosstrain.components.core.hub import SCHEME, download, read_address
from crosstrain.components.core.manifest import File, Manifest, ModelFacts
from crosstrain.components.core.step import Result
from crosstrain.components.core.storage import Store, open_store
from crosstrain.components.core.weights import DTYPES, INDEX_NAME, Tensor, model_tensors, weight_files
from crosstrain.components.import_model.config import Config

log = logging.getLogger(__name__)

ARCHITECTURES = (
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Dense decoders with one tensor a module; each is trained on, merged and proven in the tests."""

TIED_BY_DEFAULT = ("SmolLM3ForCausalLM",)
"""Architectures whose config.json may leave tie_word_embeddings out when it is true."""

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_NAME,
)
"""What belongs to a model beside its weights; other files of the folder are left out of the manifest."""


def run(config: Config) -> Result:
    """Check the folder, hash what belongs to the model, and write the manifest.

    Raises:
        FileNotFoundError: no config.json, no weights, or a shard that the index names is missing.
        ValueError: the weights are pickled, torn or quantised, the architecture is not supported, or a model of the hub
            is named without its commit.
        PermissionError, ConnectionError: the hub refuses, or is not reached.
    """
    started = time.perf_counter()
    artifact = _copy(config) if config.source.startswith(SCHEME) else _refer(config)
    size = sum(file.bytes for file in artifact.manifest.files)
    return Result(
        artifact,
        {
            "parameters": artifact.facts.parameters,
            "files": len(artifact.manifest.files),
            "bytes": size,
            "bytes_per_second": size / (time.perf_counter() - started),
        },
    )


def _refer(config: Config) -> Artifact:
    """The manifest of a folder whose files stay where they are."""
    source = open_store(config.source)
    settings = read_config(source)
    tensors = _read_tensors(source)
    with ArtifactWriter(config.output) as out:
        files = [_hash(source, path) for path in _listing(source)]
        facts = model_facts(source, settings, tensors, {file.path: file.sha256 for file in files})
        manifest = Manifest(
            component="import_model",
            facts=facts,
            files=tuple(files),
            options=config.options(),
            inputs={},
            base=source.uri,
        )
        return commit_manifest(out.store, manifest)


def _copy(config: Config) -> Artifact:
    """A commit of a model of the hub, copied; config.json is judged before a weight is fetched."""
    model = read_address(config.source)
    with ArtifactWriter(config.output) as out:
        for name, wanted in (("config", ["config.json"]), ("model", [*SIDE_FILES, "*.safetensors"])):
            download(model, out.staging / name, wanted)
            source = open_store(str(out.staging / name))
            source.uri = model.address  # what messages name
            settings = read_config(source)
        tensors = _read_tensors(source)
        hashes = {path: _hash(source, path).sha256 for path in ["tokenizer.json"] if source.exists(path)}
        facts = model_facts(source, settings, tensors, hashes)
        for path in _listing(source):
            out.add(out.staging / "model" / path, path)
        return out.commit("import_model", facts, config.options() | {"source": model.address}, {})


def read_config(source: Store) -> dict[str, Any]:
    """config.json, checked to be of a model that the project can train, merge and evaluate."""
    where = source.locate("config.json")
    try:
        settings = json.loads(source.read("config.json"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{where}: not there; give the folder that save_pretrained wrote") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    architectures = settings.get("architectures") if isinstance(settings, dict) else None
    if not architectures or architectures[0] not in ARCHITECTURES:
        named = architectures[0] if architectures else "no architecture"
        raise ValueError(f"{where}: names {named}; supported: {', '.join(ARCHITECTURES)}")
    if "quantization_config" in settings:
        raise ValueError(f"{where}: the weights are quantised; save the model dequantised to bfloat16 or float32 first")
    missing = [name for name in ("vocab_size", "max_position_embeddings", "num_hidden_layers") if name not in settings]
    if missing:
        raise ValueError(f"{where}: lacks {missing[0]}; save it with transformers' save_pretrained")
    return settings


def _read_tensors(source: Store) -> dict[str, Tensor]:
    try:
        return model_tensors(source)
    except FileNotFoundError:
        pickled = [e.key for e in source.list() if e.key.endswith((".bin", ".pt", ".pth")) and "/" not in e.key]
        if pickled and not source.exists(INDEX_NAME):
            raise ValueError(
                f"{source.locate(pickled[0])}: pickled weights can run code and are refused; convert them with "
                "save_pretrained(safe_serialization=True)"
            ) from None
        raise


def _listing(source: Store) -> list[str]:
    return sorted([*(name for name in SIDE_FILES if source.exists(name)), *weight_files(source)])


def _hash(source: Store, path: str) -> File:
    local = source.local_path(path)
    if local is not None:
        return File(path=path, bytes=local.stat().st_size, sha256=hash_file(local))
    with source.open(path) as stream:
        digest, size = hashlib.sha256(), 0
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return File(path=path, bytes=size, sha256=digest.hexdigest())


def model_facts(
    source: Store, settings: dict[str, Any], tensors: dict[str, Tensor], hashes: dict[str, str]
) -> ModelFacts:
    """What the configuration and the headers tell; parameters are counted once where embeddings are tied."""
    tied = bool(settings.get("tie_word_embeddings", settings["architectures"][0] in TIED_BY_DEFAULT))
    counted = [t for t in tensors.values() if not (tied and t.name == "lm_head.weight")]
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or embedding.shape[0] != settings["vocab_size"]:
        shape = "missing" if embedding is None else f"{embedding.shape[0]} rows"
        raise ValueError(
            f"{source.uri}: config.json says vocab_size {settings['vocab_size']}, model.embed_tokens.weight: {shape}"
        )
    if not tied and "lm_head.weight" not in tensors:
        raise ValueError(f"{source.uri}: lm_head.weight is missing, and config.json does not say tie_word_embeddings")
    if "tokenizer.json" not in hashes:
        log.warning("%s: no tokenizer.json; steps that need text will refuse this model", source.uri)
    return ModelFacts(
        architecture=settings["architectures"][0],
        parameters=sum(t.numel for t in counted),
        dtype=_main_dtype(counted),
        vocab_size=settings["vocab_size"],
        max_sequence_length=settings["max_position_embeddings"],
        tied_embeddings=tied,
        tokenizer_sha256=hashes.get("tokenizer.json"),
        precision="imported",
    )


def _main_dtype(tensors: list[Tensor]) -> str:
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[DTYPES[tensor.dtype]] += tensor.numel
    return counts.most_common(1)[0][0]
