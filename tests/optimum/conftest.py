"""optimum-neuron 0.4.5 without Neuron: its own code, with empty stand-ins for packages that no package index has.

`make test-neuron` runs this folder in an environment of its own (constraints-neuron.txt); elsewhere there is nothing
to collect. A stand-in has no behaviour but what the tests need: parallel sizes, and that a process is the first one.
What is tested are the real argument classes, the real consolidation and the real patterns of names; no layer, no
trainer and no compiler runs here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = importlib.util.find_spec("optimum") is not None
collect_ignore_glob = [] if HERE else ["*"]

ABSENT = ("torch_xla", "torch_neuronx", "neuronx_distributed", "libneuronxla", "neuronxcc")


class Sizes:
    """What the stand-ins say of the processes."""

    tensor, pipeline, data = 1, 1, 1


def _answers(name: str) -> Any:
    """What a function of a stand-in gives back; everything else is a class that can be inherited from."""
    known = {
        "get_tensor_model_parallel_size": lambda: Sizes.tensor,
        "get_pipeline_model_parallel_size": lambda: Sizes.pipeline,
        "get_data_parallel_size": lambda: Sizes.data,
        "model_parallel_is_initialized": lambda: True,
        "global_ordinal": lambda: 0,
        "get_local_ordinal": lambda: 0,
        "xla_device": lambda *_: "xla:0",
        "get_platform_target": lambda: "trn1",
    }
    if name.startswith("get_") and name.endswith("_rank"):
        return lambda: 0
    return known.get(name) or type(name, (), {"__init__": lambda self, *args, **options: None})


class _StandIn(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:  # `from package import module`
            value = importlib.import_module(f"{self.__name__}.{name}") if name.islower() and _is_module(name) else None
        except ImportError:
            value = None
        value = value or _answers(name)
        setattr(self, name, value)
        return value


def _is_module(name: str) -> bool:
    return name in {"parallel_state", "parallel_layers", "xla_model", "runtime", "xla_backend", "serialization"}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write tests/data/neuron anew")


if HERE:
    sys.meta_path.append(_Finder())


@pytest.fixture
def sizes() -> Iterator[type[Sizes]]:
    """The parallel sizes that the stand-ins report; set them in the test."""
    yield Sizes
    Sizes.tensor, Sizes.pipeline, Sizes.data = 1, 1, 1


@dataclass(frozen=True)
class Shape:
    """A small Llama with the ratios of Llama-3.2-1B: a quarter as many key-value heads, four times as wide inside."""

    layers: int = 2
    hidden: int = 32
    heads: int = 8
    key_value_heads: int = 2
    inside: int = 128
    rank: int = 2

    def modules(self) -> dict[str, tuple[int, int]]:
        """Linear module to the shape of its weight."""
        size = self.hidden // self.heads
        kinds = {
            "self_attn.q_proj": (self.heads * size, self.hidden),
            "self_attn.k_proj": (self.key_value_heads * size, self.hidden),
            "self_attn.v_proj": (self.key_value_heads * size, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * size),
            "mlp.gate_proj": (self.inside, self.hidden),
            "mlp.up_proj": (self.inside, self.hidden),
            "mlp.down_proj": (self.hidden, self.inside),
        }
        return {f"model.layers.{n}.{kind}": shape for n in range(self.layers) for kind, shape in kinds.items()}


class Sharder:
    """Writes checkpoints as optimum-neuron's ranks do, cut by its own transformations."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch

    def adapter(self, shape: Shape, fused: bool, targets: Sequence[str] = ()) -> dict[str, Any]:
        """A whole adapter by peft's names; layers that share one A on the ranks share it here."""
        import torch

        torch.manual_seed(3)
        whole, shared = {}, {}
        for name, (outputs, inputs) in shape.modules().items():
            if targets and name.rpartition(".")[2] not in targets:
                continue
            parent, _, kind = name.rpartition(".")
            group = "gate_up" if kind in ("gate_proj", "up_proj") else "qkv" if kind in ("q_proj", "k_proj", "v_proj")\
                and fused else kind  # fmt: skip
            a = shared.setdefault(f"{parent}.{group}", torch.randint(-9, 9, (shape.rank, inputs)).float())
            whole[f"base_model.model.{name}.lora_A.weight"] = a.clone()
            whole[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, shape.rank)
        return whole

    def write(self, whole: dict[str, Any], shape: Shape, ranks: int, stages: int = 1, fuse_qkv: bool = False,
              step: int = 4, targets: Sequence[str] = ()) -> Path:  # fmt: skip
        """A checkpoint folder; its parent is what a run's output_dir would be."""
        import torch
        from peft import LoraConfig

        place = self._folder / f"checkpoint-{step}" / "adapter_default"
        shards = place / "adapter_shards"
        (shards / "model").mkdir(parents=True)
        per_stage = shape.layers // stages
        for stage in range(stages):
            layers = range(stage * per_stage, (stage + 1) * per_stage)
            specs = [spec for n in layers for spec in self._specs(shape, n, ranks, fuse_qkv, whole)]
            for rank in range(ranks):
                state = self._local(whole, shape, specs, layers, ranks, rank)
                torch.save(state, shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt")
            metadata = {"parameters": _parameters(state, ranks),
                        "model_weight_transformation_specs": [one.to_metadata() for one in specs]}  # fmt: skip
            (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(metadata, indent=1))
        for mark in ("checkpoint", "done"):
            (shards / mark).write_text("1")
        kinds = list(targets) or sorted({name.rpartition(".")[2] for name in shape.modules()})
        LoraConfig(task_type="CAUSAL_LM", r=shape.rank, lora_alpha=4, target_modules=kinds).save_pretrained(place)
        config = place / "adapter_config.json"
        settings = json.loads(config.read_text())
        settings["target_modules"].sort()  # a set there, in any order
        config.write_text(json.dumps(settings, indent=1))
        return place.parent

    def _specs(self, shape: Shape, layer: int, ranks: int, fuse_qkv: bool, whole: dict[str, Any]) -> list[Any]:
        from optimum.neuron.models.training import transformations_utils as upstream

        root = f"base_model.model.model.layers.{layer}"
        gate_up = upstream.FusedLinearsSpec("gate_up_proj", ["gate_proj", "up_proj"], False, "column",
                                            [shape.inside] * 2, ranks)  # fmt: skip
        made = [upstream.ModelWeightTransformationSpecs(f"{root}.mlp", gate_up)]
        copies = max(1, ranks // shape.key_value_heads)
        size = shape.hidden // shape.heads
        if shape.key_value_heads % ranks:
            qkv = upstream.GQAQKVColumnParallelLinearSpec(
                "qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", shape.heads, shape.key_value_heads, copies,
                shape.heads * size // ranks, shape.key_value_heads * size * copies // ranks, fuse_qkv, False, ranks,
            )  # fmt: skip
            made.append(upstream.ModelWeightTransformationSpecs(f"{root}.self_attn", qkv))
        elif fuse_qkv and shape.heads == shape.key_value_heads:
            qkv = upstream.FusedLinearsSpec("qkv_proj", ["q_proj", "k_proj", "v_proj"], False, "column",
                                            [shape.hidden] * 3, ranks)  # fmt: skip
            made.append(upstream.ModelWeightTransformationSpecs(f"{root}.self_attn", qkv))
        for specs in made:
            first = specs.specs[0]
            names = first.linear_names if hasattr(first, "linear_names") else ["q_proj", "k_proj", "v_proj"]
            adapted = f"{specs.module_fully_qualified_name}.{names[0]}.lora_A.weight" in whole
            first.peft_type = "lora" if adapted else None
        return made

    def _local(
        self, whole: dict[str, Any], shape: Shape, specs: list[Any], layers: range, ranks: int, rank: int
    ) -> Any:
        from optimum.neuron.models.training import transformations_utils as upstream

        self._patch.setattr(upstream, "get_tensor_model_parallel_size", lambda: ranks)
        self._patch.setattr(upstream, "get_tensor_model_parallel_rank", lambda: rank)
        state = {name: tensor.clone() for name, tensor in whole.items()
                 if any(f".layers.{n}." in name for n in layers)}  # fmt: skip
        sorted_outputs = set()
        for one in specs:
            spec, module = one.specs[0], one.module_fully_qualified_name
            if spec.peft_type:
                state = spec.adapt_state_dict(module, {}, state, {})
                if getattr(spec, "fuse_qkv", False):  # upstream loads this name and saves the layer's own
                    state[f"{module}.qkv_proj.lora_B.weight_qkv"] = state.pop(f"{module}.qkv_proj.lora_B.weight")
                if hasattr(spec, "output_projection_name"):
                    sorted_outputs.add(f"{module}.o_proj.lora_A.weight")
        for name, tensor in state.items():
            axis = _axis(name)
            if axis is not None and "gate_up" not in name and "qkv" not in name and name not in sorted_outputs:
                state[name] = tensor.chunk(ranks, axis)[rank]
        return {name: tensor.contiguous().clone() for name, tensor in state.items()}


def _axis(name: str) -> int | None:
    """The axis along which a parameter is cut over the ranks; None: every rank holds it whole."""
    row = "o_proj" in name or "down_proj" in name
    return 1 if row and ".lora_A." in name else 0 if not row and ".lora_B." in name else None


def _parameters(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in state:
        full = name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
        axis = None if name.endswith("weight_qkv") else _axis(name)  # neuronx-distributed does not mark that one
        cut = {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": 1, "num_partitions": ranks}
        made[full] = {"tensor_model_parallel": False} if axis is None else cut
    base = "base_model.model.model.embed_tokens.weight"
    return {base: {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1, "num_partitions": ranks},
            **made}  # fmt: skip


@pytest.fixture
def sharder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sharder:
    """Writes checkpoints under the test's folder."""
    return Sharder(tmp_path / "run", monkeypatch)


@pytest.fixture
def shape() -> Callable[..., Shape]:
    """Small models' shapes."""
    return Shape
