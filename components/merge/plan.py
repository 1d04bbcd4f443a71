"""What a merge will write, decided from headers and configurations alone, before a weight is read.

Every tensor of the merged model gets one `Edit`; every key of the adapter must be used by one. Embeddings need
care: where lm_head is tied to embed_tokens and the adapter changes one of them alone, the two differ afterwards,
and a folder that still says "tied" would be another model (known from other tools' merges).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from crosstrain.components.core.peft_adapter import Adapter, LoraModule
from crosstrain.components.core.weights import SINGLE_NAME, Tensor, read_bytes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Edit:
    """One tensor of the merged model."""

    target: Tensor
    """Name, type, shape and file as it will be written; its offset has no meaning."""
    source: Tensor
    """Where its values come from."""
    from_adapter: bool = False
    """Whether `source` lies in the adapter instead of the base."""
    lora: LoraModule | None = None
    """What is added to it."""

    @property
    def copied(self) -> bool:
        """Whether its bytes are the base's."""
        return self.lora is None and not self.from_adapter


@dataclass(frozen=True)
class Plan:
    """All edits in file order, and the options of config.json that change."""

    edits: tuple[Edit, ...]
    settings: dict[str, Any]

    @property
    def files(self) -> dict[str, list[Edit]]:
        """File name to its edits, in order."""
        files: dict[str, list[Edit]] = {}
        for edit in self.edits:
            files.setdefault(edit.target.file, []).append(edit)
        return files


def plan_merge(base: Mapping[str, Tensor], adapter: Adapter, *, tied: bool, untie: bool, max_shard_bytes: int) -> Plan:
    """Decide every tensor of the merged model.

    Args:
        base: The base model's tensors, in file order.
        adapter: The adapter's headers.
        tied: Whether the base ties lm_head to embed_tokens.
        untie: Whether they may be untied where the adapter changes one of them alone.
        max_shard_bytes: Largest file; 0 keeps the base's.

    Raises:
        ValueError: the adapter changes a tensor that the base lacks or that has another shape, or it changes
            one of two tied embeddings and `untie` is false.
    """
    base = dict(base)
    settings: dict[str, Any] = {}
    replaced = dict(adapter.replaced)
    touched = {EMBEDDING, HEAD} & {*adapter.modules, *replaced}
    if tied and touched:
        base.pop(HEAD, None)
        if _same_replacement(adapter):
            del replaced[HEAD]
        elif not untie:
            raise ValueError(
                f"{adapter.store.uri}: changes {', '.join(sorted(touched))}, and the base ties its two embeddings to "
                "each other; train without them, or set tied_embeddings=untie to write both"
            )
        else:
            base[HEAD] = replace(base[EMBEDDING], name=HEAD)
            settings["tie_word_embeddings"] = False
    if unknown := sorted({*adapter.modules, *replaced} - base.keys()):
        raise ValueError(
            f"{adapter.store.uri}: changes {unknown[0]}, and the base has no such tensor ({len(unknown)} in all)"
        )
    edits = [_edit(tensor, replaced.get(name), adapter, name) for name, tensor in base.items()]
    rows = {edit.target.name: edit.target.rows for edit in edits if edit.target.name in (EMBEDDING, HEAD)}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"{adapter.store.uri}: embed_tokens would have {rows[EMBEDDING]} rows and lm_head {rows[HEAD]}"
        )
    if EMBEDDING in rows and rows[EMBEDDING] != base[EMBEDDING].rows:
        settings["vocab_size"] = rows[EMBEDDING]
    return Plan(tuple(_reshard(edits, max_shard_bytes) if max_shard_bytes else edits), settings)


def _same_replacement(adapter: Adapter) -> bool:
    """Whether the adapter replaces both embeddings by the same bytes, as a resized tied model is saved."""
    pair = [adapter.replaced.get(name) for name in (EMBEDDING, HEAD)]
    if None in pair or {EMBEDDING, HEAD} & adapter.modules.keys():
        return False
    first, second = (tensor for tensor in pair if tensor is not None)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    step = 1 << 24
    return all(
        (
            read_bytes(adapter.store, first.file, first.offset + at, min(step, first.bytes - at))
            == read_bytes(adapter.store, second.file, second.offset + at, min(step, first.bytes - at))
        ).all()
        for at in range(0, first.bytes, step)
    )


def _edit(base: Tensor, replacement: Tensor | None, adapter: Adapter, name: str) -> Edit:
    source = base if replacement is None else replacement
    rows_may_change = name in (EMBEDDING, HEAD)
    if source.shape[rows_may_change:] != base.shape[rows_may_change:]:
        raise ValueError(f"{adapter.store.uri}: {name} is {source.shape}, and the base's is {base.shape}")
    lora = adapter.modules.get(name)
    if lora is not None and lora.shape != source.shape:
        raise ValueError(f"{adapter.store.uri}: made for {name} of {lora.shape}, and the base's is {source.shape}")
    return Edit(replace(base, shape=source.shape), source, replacement is not None, lora)


def _reshard(edits: list[Edit], limit: int) -> list[Edit]:
    """The same edits in files of at most `limit` bytes, named as Hugging Face names them."""
    groups: list[list[Edit]] = [[]]
    size = 0
    for edit in edits:
        if groups[-1] and size + edit.target.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(edit)
        size += edit.target.bytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [SINGLE_NAME]
    return [
        replace(edit, target=replace(edit.target, file=name))
        for name, group in zip(names, groups, strict=True)
        for edit in group
    ]
