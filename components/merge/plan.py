"""What a merge will write, decided from headers and configurations alone, before a weight is read.

Every tensor of the merged model gets one `Edit`; every key of the adapters must be used by one. Several adapters add
up: a tensor that one of them replaces is that one's alone. Embeddings need care: where lm_head is tied to embed_tokens
and an adapter changes one of them alone, the two differ afterwards, and a folder that still says "tied" would be
another model (known from other tools' merges).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crosstrain.components.core.peft_adapter import Adapter, LoraModule
from crosstrain.components.core.storage import Store
from crosstrain.components.core.weights import SINGLE_NAME, Tensor, read_bytes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Weighted:
    """An adapter and how much of it is merged."""

    adapter: Adapter
    weight: float = 1.0


@dataclass(frozen=True)
class Change:
    """What one adapter adds to a tensor."""

    store: Store
    lora: LoraModule
    weight: float
    alone: bool
    """Whether this is the one adapter of the merge, at full weight."""


@dataclass(frozen=True)
class Edit:
    """One tensor of the merged model."""

    target: Tensor
    """Name, type, shape and file as it will be written; its offset has no meaning."""
    source: Tensor
    """Where its values come from."""
    store: Store | None = None
    """The adapter that `source` lies in; None: the base."""
    changes: tuple[Change, ...] = ()
    """What is added to it."""

    @property
    def copied(self) -> bool:
        """Whether its bytes are the base's."""
        return not self.changes and self.store is None


@dataclass(frozen=True)
class Plan:
    """All edits in file order, and the options of config.json that change."""

    edits: tuple[Edit, ...]
    settings: dict[str, Any]
    vocab_size: int
    """Rows of the embedding before it is trimmed."""

    @property
    def files(self) -> dict[str, list[Edit]]:
        """File name to its edits, in order."""
        files: dict[str, list[Edit]] = {}
        for edit in self.edits:
            files.setdefault(edit.target.file, []).append(edit)
        return files


def plan_merge(
    base: Mapping[str, Tensor],
    adapters: Sequence[Weighted],
    *,
    tied: bool,
    untie: bool,
    max_shard_bytes: int,
    vocab_size: int = 0,
) -> Plan:
    """Decide every tensor of the merged model.

    Args:
        base: The base model's tensors, in file order.
        adapters: The adapters' headers.
        tied: Whether the base ties lm_head to embed_tokens.
        untie: Whether they may be untied where an adapter changes one of them alone.
        max_shard_bytes: Largest file; 0 keeps the base's.
        vocab_size: Rows that the embeddings are trimmed to; 0: all.

    Raises:
        ValueError: an adapter changes a tensor that the base lacks or that has another shape, or it changes
            one of two tied embeddings and `untie` is false, or two adapters do not go together.
    """
    base = dict(base)
    settings: dict[str, Any] = {}
    check_weights(adapters)
    replaced = {name: (one.adapter, tensor) for one in adapters for name, tensor in one.adapter.replaced.items()}
    changed = {name for one in adapters for name in one.adapter.modules}
    touched = {EMBEDDING, HEAD} & {*changed, *replaced}
    if tied and touched:
        base.pop(HEAD, None)
        if not {EMBEDDING, HEAD} & changed and _same_replacement(replaced):
            del replaced[HEAD]
        elif not untie:
            raise ValueError(
                f"{_where(adapters, touched)}: changes {', '.join(sorted(touched))}, and the base ties its two "
                "embeddings to each other; train without them, or set tied_embeddings=untie to write both"
            )
        else:
            base[HEAD] = replace(base[EMBEDDING], name=HEAD)
            settings["tie_word_embeddings"] = False
    if unknown := {*changed, *replaced} - base.keys():
        raise ValueError(
            f"{_where(adapters, unknown)}: changes {min(unknown)}, and the base has no such tensor "
            f"({len(unknown)} in all)"
        )
    edits = [_edit(tensor, replaced.get(name), adapters) for name, tensor in base.items()]
    edits, rows = _fit_vocabulary(edits, vocab_size)
    if EMBEDDING in base and (vocab_size or rows) != base[EMBEDDING].rows:
        settings["vocab_size"] = vocab_size or rows
    return Plan(tuple(_reshard(edits, max_shard_bytes) if max_shard_bytes else edits), settings, rows)


def check_weights(adapters: Sequence[Weighted]) -> None:
    """Refuse adapters whose sum has no meaning.

    Raises:
        ValueError: DoRA among several or with a weight, a replaced tensor with a weight, or one that another touches.
    """
    for one in adapters:
        where = one.adapter.store.uri
        if one.adapter.dora and (len(adapters) > 1 or one.weight != 1):
            raise ValueError(f"{where}: a DoRA adapter rescales whole rows, so it is merged alone and with weight 1")
        whole = one.adapter.replaced.keys() - one.adapter.modules.keys()  # peft saves a tuned lm_head's base beside it
        if whole and one.weight != 1:
            raise ValueError(f"{where}: replaces {min(whole)} whole, which takes no weight but 1")
    for one in adapters:
        for name in one.adapter.replaced:
            for other in adapters:
                if other is not one and name in {*other.adapter.modules, *other.adapter.replaced}:
                    raise ValueError(
                        f"{one.adapter.store.uri}: replaces {name}, which {other.adapter.store.uri} changes"
                    )


def _where(adapters: Sequence[Weighted], names: set[str]) -> str:
    """The first adapter that touches one of some tensors."""
    return next(one.adapter.store.uri for one in adapters if names & {*one.adapter.modules, *one.adapter.replaced})


def _same_replacement(replaced: Mapping[str, tuple[Adapter, Tensor]]) -> bool:
    """Whether both embeddings are replaced by the same bytes, as a resized tied model is saved."""
    pair = [replaced[name] for name in (EMBEDDING, HEAD) if name in replaced]
    if len(pair) < 2:
        return False
    (one, first), (other, second) = pair
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    step = 1 << 24
    return all(
        (
            read_bytes(one.store, first.file, first.offset + at, min(step, first.bytes - at))
            == read_bytes(other.store, second.file, second.offset + at, min(step, first.bytes - at))
        ).all()
        for at in range(0, first.bytes, step)
    )


def _edit(base: Tensor, replacement: tuple[Adapter, Tensor] | None, adapters: Sequence[Weighted]) -> Edit:
    name = base.name
    source, store = (base, None) if replacement is None else (replacement[1], replacement[0].store)
    rows_may_change = name in (EMBEDDING, HEAD)
    if source.shape[rows_may_change:] != base.shape[rows_may_change:]:
        raise ValueError(f"{store.uri if store else ''}: {name} is {source.shape}, and the base's is {base.shape}")
    changes = []
    for one in adapters:
        if (lora := one.adapter.modules.get(name)) is None:
            continue
        if lora.shape != source.shape:
            raise ValueError(
                f"{one.adapter.store.uri}: made for {name} of {lora.shape}, and the base's is {source.shape}"
            )
        alone = len(adapters) == 1 and one.weight == 1
        changes.append(Change(one.adapter.store, lora, one.weight, alone))
    return Edit(replace(base, shape=source.shape), source, store, tuple(changes))


def _fit_vocabulary(edits: list[Edit], vocab_size: int) -> tuple[list[Edit], int]:
    """The edits with their embeddings trimmed to some rows (0: all), and the rows that there were."""
    rows = {edit.target.name: edit.target.rows for edit in edits if edit.target.name in (EMBEDDING, HEAD)}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"embed_tokens would have {rows[EMBEDDING]} rows and lm_head {rows[HEAD]}; one of them is wrong"
        )
    found = rows.get(EMBEDDING, 0)
    if vocab_size > found:
        raise ValueError(f"the tokenizer has {vocab_size} ids, and embed_tokens {found} rows; it is another model's")
    if not vocab_size:
        return edits, found
    return [_trimmed(edit, vocab_size) if edit.target.name in rows else edit for edit in edits], found


def _trimmed(edit: Edit, rows: int) -> Edit:
    shape = (rows, *edit.target.shape[1:])
    return replace(edit, target=replace(edit.target, shape=shape), source=replace(edit.source, shape=shape))


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
