"""How much memory training a Llama takes on each device, estimated from its shape alone; free of torch.

Per parameter: 4 bytes of fp32 weight, 4 of gradient, 8 of AdamW's two moments, over the ranks that share them
(FSDP2, tensor, pipeline); where FSDP2 shares them, two gathered blocks and the gathered embeddings besides; and outside
of fp32 a 2-byte copy to compute with, which autograd keeps of every block. A frozen base is held in its own type and
has none of the rest; its adapter has all of it.

Per token and block, kept for the backward pass: w(4i + 2q + 3kv) + 4 * 6h bytes, where w is the width of the
matrix products (4 in fp32, else 2), i the MLP's size, q and kv the widths of queries and keys, h the hidden size:
gate, up, their activation and product; queries and attention's output twice, keys and values; and in fp32 the
residual stream and the norms around it. Recomputing all but the matrix products keeps w(2i + q + 2kv + 2h) + 4h of
it, recomputing whole blocks 4h and one block. Per token at the end: the logits in w bytes, in fp32, and their
gradient. Attention's scores are not kept (fused attention).

On torch's CPU build the blocks' part is within a quarter of what autograd saves (tests/components/core/test_memory.py).
Left out: the allocator's loss to fragments, communication buffers, CUDA's own half gigabyte to a gigabyte, tensors
that live only inside one operation. So an estimate that just fits may not fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GIB = 2**30
FP32, MOMENTS, HALF = 4, 8, 2

Recomputation = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama that memory depends on."""

    hidden: int
    intermediate: int
    layers: int
    queries: int
    """Heads x width of a head."""
    keys: int
    """Key-value heads x width of a head."""
    vocab: int
    tied: bool

    @classmethod
    def read(cls, fields: Mapping[str, Any], vocab: int) -> "Shape":
        """From the fields of a Hugging Face configuration.

        Raises:
            ValueError: a field is missing.
        """
        try:
            hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
            head = int(fields.get("head_dim") or hidden // heads)
            return cls(
                hidden=hidden,
                intermediate=int(fields["intermediate_size"]),
                layers=int(fields["num_hidden_layers"]),
                queries=heads * head,
                keys=int(fields.get("num_key_value_heads") or heads) * head,
                vocab=vocab,
                tied=bool(fields.get("tie_word_embeddings", False)),
            )
        except KeyError as missing:
            raise ValueError(f"the model's configuration has no {missing}") from None

    @property
    def block(self) -> int:
        """Parameters of one decoder block."""
        matrices = 2 * self.queries + 2 * self.keys + 3 * self.intermediate
        return self.hidden * (matrices + 2)

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and lm_head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Parameters of the model; without biases, as Llama has none."""
        return self.embeddings + self.layers * self.block + self.hidden

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA adapter on every linear layer of the blocks."""
        ends = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends


@dataclass(frozen=True)
class Cut:
    """What one device holds of the work."""

    tokens: int
    """Of one forward pass: micro-batch x sequence length."""
    shard: int = 1
    """Data-parallel ranks that share parameters, gradients and optimizer state."""
    tensor: int = 1
    pipeline: int = 1
    recompute: Recomputation = "none"
    in_flight: int = 1
    """Micro-batches whose activations a pipeline stage holds at once."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer,
                 "activations": self.activations}  # fmt: skip
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        return f"{self.total / GIB:.1f} GiB ({listed})"


def estimate_training(shape: Shape, cut: Cut, half: bool) -> Estimate:
    """Training every parameter.

    Args:
        shape: The model.
        cut: What a device holds of it.
        half: Whether matrix products are in 16 or 8 bits.
    """
    model = shape.parameters / (cut.tensor * cut.pipeline)
    held = model / cut.shard
    copies = (HALF * model if half else 0.0) + _gathered(shape, cut, FP32)
    return Estimate(FP32 * held + copies, FP32 * held, MOMENTS * held, _activations(shape, cut, half))


def estimate_tuning(shape: Shape, cut: Cut, rank: int, base_bytes: int) -> Estimate:
    """Training an fp32 LoRA adapter on a frozen base.

    Args:
        shape: The base.
        cut: What a device holds of both.
        rank: Rank of the adapter, on every linear layer.
        base_bytes: Bytes a parameter of the base.
    """
    adapter = shape.adapter(rank) / cut.shard
    base = base_bytes * shape.parameters / (cut.shard * cut.tensor * cut.pipeline)
    weights = base + _gathered(shape, cut, base_bytes) + FP32 * adapter
    activations = _activations(shape, cut, half=base_bytes == HALF)
    return Estimate(weights, FP32 * adapter, MOMENTS * adapter, activations)


def _gathered(shape: Shape, cut: Cut, width: int) -> float:
    """What FSDP2 gathers at a time: a block and the next one, and the root with the embeddings."""
    return 0.0 if cut.shard == 1 else width * (2 * shape.block + shape.embeddings) / cut.tensor


def _activations(shape: Shape, cut: Cut, half: bool) -> float:
    width = HALF if half else FP32
    stream = FP32 * shape.hidden
    products = width * (4 * shape.intermediate + 2 * shape.queries + 3 * shape.keys) / cut.tensor
    block = products + 6 * stream
    outputs = width * ((2 * shape.intermediate + shape.queries + 2 * shape.keys) / cut.tensor + 2 * shape.hidden)
    layers = shape.layers / cut.pipeline
    kept = {"none": block * layers, "selective": (outputs + stream) * layers, "full": stream * layers + block}
    logits = shape.vocab * (width + 2 * FP32) / cut.tensor
    return cut.tokens * (kept[cut.recompute] * cut.in_flight + logits)
