"""A stand-in for TransformerEngine that has its signatures, as recorded from its source, and multiplies in fp32."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

RECORD = json.loads((Path(__file__).resolve().parents[3] / "data" / "transformer_engine.json").read_text())


def strict(owner: str, name: str) -> Callable[..., dict[str, Any]]:
    """A function that takes what TransformerEngine's takes, and gives its arguments by name."""
    known = [
        inspect.Parameter(
            parameter,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if default is None else default,
        )
        for parameter, default in RECORD[owner][name]["parameters"]
    ]
    signature = inspect.Signature(known)
    return lambda *args, **words: dict(signature.bind(*args, **words).arguments)


class Engine:
    """What the stand-in was asked for."""

    def __init__(self) -> None:
        self.depth: list[dict[str, Any]] = []
        self.micro_batches: list[bool | None] = []
        self.available: tuple[bool, str] = (True, "")
        self.asked: list[str] = []


def make_modules(engine: Engine) -> dict[str, ModuleType]:
    class Linear(nn.Module):
        def __init__(self, *args: Any, **words: Any) -> None:
            super().__init__()
            given = strict("te", "Linear")(*args, **words)
            assert given["device"] == "meta" and given["params_dtype"] == torch.float32
            self.weight = nn.Parameter(torch.empty(given["out_features"], given["in_features"], device="meta"))
            self.use_bias = given["bias"]
            if self.use_bias:
                self.bias = nn.Parameter(torch.empty(given["out_features"], device="meta"))
            else:
                self.bias = torch.empty(0, device="meta")
            self.fp8_meta: dict[str, Any] = {}

        def forward(self, *args: Any, **words: Any) -> torch.Tensor:
            given = strict("layer", "forward")(*args, **words)
            assert engine.depth, "te.Linear outside te.autocast"
            self.init_fp8_metadata()
            engine.micro_batches.append(given.get("is_first_microbatch"))
            return nn.functional.linear(given["inp"], self.weight, self.bias if self.use_bias else None)

        def init_fp8_metadata(self, *args: Any, **words: Any) -> None:
            strict("layer", "init_fp8_metadata")(*args, **words)
            recipe = engine.depth[-1]["recipe"]
            for key, size in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                if key not in self.fp8_meta:
                    tensors = {}
                    if recipe.name == "DelayedScaling":
                        length = recipe.fields["amax_history_len"]
                        tensors = {"scale": torch.ones(size), "amax_history": torch.zeros(length, size)}
                    self.fp8_meta[key] = SimpleNamespace(**tensors)

        def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]] | None:
            if "scaling_fwd" not in self.fp8_meta:
                return None
            return {key: [value.scale.clone(), value.amax_history.clone()] for key, value in self.fp8_meta.items()}

        def reset_fp8_meta_tensors(self, *args: Any, **words: Any) -> None:
            given = strict("layer", "reset_fp8_meta_tensors")(*args, **words)["fp8_meta_tensors"]
            for key, value in self.fp8_meta.items():
                value.scale.copy_(given[key][0])
                value.amax_history.copy_(given[key][1])

        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(8, dtype=torch.uint8)

        def set_extra_state(self, state: torch.Tensor) -> None:
            raise AssertionError("a pickle of TransformerEngine was loaded")

    class Autocast:
        def __init__(self, *args: Any, **words: Any) -> None:
            self.given = strict("te", "autocast")(*args, **words)

        def __enter__(self) -> None:
            engine.depth.append(self.given)

        def __exit__(self, *error: object) -> None:
            engine.depth.pop()

    def probe(name: str) -> Callable[..., tuple[bool, str]]:
        def ask(*args: Any, **words: Any) -> tuple[bool, str]:
            assert strict("te", name)(*args, **words) == {"return_reason": True}
            engine.asked.append(name)
            return engine.available

        return ask

    def maker(name: str) -> Callable[..., Any]:
        return lambda *args, **words: SimpleNamespace(name=name, fields=strict("recipe", name)(*args, **words))

    top, pytorch, common, recipe = (
        ModuleType(name)
        for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common",
                     "transformer_engine.common.recipe")
    )  # fmt: skip
    top.pytorch, top.common, common.recipe = pytorch, common, recipe  # type: ignore[attr-defined]
    pytorch.Linear, pytorch.autocast = Linear, Autocast  # type: ignore[attr-defined]
    for name in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"):
        setattr(pytorch, name, probe(name))
    for name, known in RECORD["recipe"].items():
        setattr(
            recipe, name, maker(name) if "parameters" in known else SimpleNamespace(**{m: m for m in known["members"]})
        )
    return {module.__name__: module for module in (top, pytorch, common, recipe)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch believe in a GPU of some kind."""

    def pretend(name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0), cuda: str = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return pretend


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., None]) -> Engine:
    """The stand-in for TransformerEngine, importable, beside a pretended H100."""
    from crosstrain.components.core.precision import transformer_engine as ours

    found = Engine()
    gpu()
    for name, module in make_modules(found).items():
        monkeypatch.setitem(sys.modules, name, module)
    ours.layer_class.cache_clear()
    monkeypatch.setattr(torch, "autocast", lambda device, dtype: torch.amp.autocast("cpu", dtype, enabled=False))
    yield found
    ours.layer_class.cache_clear()


@pytest.fixture
def llama() -> Callable[..., Any]:
    """Make a tiny Llama whose every dimension is a multiple of 128 by default."""

    def make(seed: int = 0, **fields: object) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**shape, **fields}))

    return make
