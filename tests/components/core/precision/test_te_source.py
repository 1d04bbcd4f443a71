"""Every call that we make of TransformerEngine, held to TransformerEngine's own Python source.

No GPU is at hand, and without one TransformerEngine does not even import. Its wheel on PyPI holds all of its Python,
though (1.2 MB; not to be installed, for its empty shell breaks peft's import). What we use of it is recorded in
tests/data/transformer_engine.json: names, parameters, defaults, fields. Our module is checked against the record in
every run, and the record against the source wherever pip can fetch the wheel. Renew it by running this file.
"""

import ast
import importlib.util
import json
import math
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstrain.components.core.precision import transformer_engine as ours
from crosstrain.components.core.precision.delayed import SIZES, SLOTS, update_history
from crosstrain.components.core.precision.recipes import E4M3, E5M2, RECIPES

VERSION = "2.20.2"
ROOT = Path(__file__).resolve().parents[4]
RECORD = ROOT / "tests" / "data" / "transformer_engine.json"
CACHE = ROOT / ".cache" / "transformer_engine"
PACKAGE = "transformer_engine"
BASES = (f"{PACKAGE}.pytorch.module.linear:Linear", f"{PACKAGE}.pytorch.module.base:TransformerEngineBaseModule")


class Source:
    """TransformerEngine's Python source, in its wheel."""

    def __init__(self, wheel: Path) -> None:
        self._files = zipfile.ZipFile(wheel)
        self._names = set(self._files.namelist())

    def path(self, module: str) -> str:
        stem = module.replace(".", "/")
        return f"{stem}.py" if f"{stem}.py" in self._names else f"{stem}/__init__.py"

    def tree(self, module: str) -> ast.Module:
        return ast.parse(self._files.read(self.path(module)))

    def text(self, module: str) -> str:
        return self._files.read(self.path(module)).decode()

    def find(self, module: str, name: str) -> tuple[str, ast.stmt]:
        """Where a name that a module offers is defined, through its imports."""
        for node in self.tree(module).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                package = module if self.path(module).endswith("__init__.py") else module.rpartition(".")[0]
                parent = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                return self.find(parent, original)
        raise AssertionError(f"{module} offers no {name}")


def parameters(function: ast.FunctionDef) -> list[list[str | None]]:
    """Names and defaults, self left out; a default of None is the string "None"."""
    args = function.args
    names = [item.arg for item in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    positional = len(names) - len(args.kwonlyargs)
    defaults = [*[None] * (positional - len(args.defaults)), *args.defaults, *args.kw_defaults]
    pairs = zip(names, defaults, strict=True)
    return [[name, ast.unparse(default) if default else None] for name, default in pairs if name not in ("self", "cls")]


def describe(node: ast.stmt) -> dict[str, Any]:
    """What a caller has to know of a function or class."""
    if isinstance(node, ast.FunctionDef):
        return {"parameters": parameters(node)}
    assert isinstance(node, ast.ClassDef)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return {"parameters": parameters(item)}
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    if fields:
        return {
            "parameters": [
                [ast.unparse(item.target), ast.unparse(item.value) if item.value else None] for item in fields
            ]
        }
    return {"members": [ast.unparse(item.targets[0]) for item in node.body if isinstance(item, ast.Assign)]}


def used() -> Iterator[tuple[str, str, ast.Call | None]]:
    """What our module uses: (te, recipe or layer; name; the call, if it is one)."""
    tree = ast.parse(Path(ours.__file__).read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("te", "recipe", "layer")
        ):
            yield node.value.id, node.attr, called.get(id(node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()" and node.attr == "forward":
            yield "layer", "forward", called[id(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "layer_class()":
            yield "te", "Linear", node


def make_record(source: Source) -> dict[str, Any]:
    """All that we use of TransformerEngine, as its source has it."""
    modules = {"te": f"{PACKAGE}.pytorch", "recipe": f"{PACKAGE}.common.recipe"}
    found: dict[str, dict[str, Any]] = {"te": {}, "recipe": {}, "layer": {}}
    bases = [source.find(*base.split(":"))[1] for base in BASES]
    methods = {item.name: item for base in reversed(bases) for item in base.body if isinstance(item, ast.FunctionDef)}  # type: ignore[attr-defined]
    for owner, name, _ in used():
        if owner == "layer":
            if not name.startswith("__"):
                found["layer"][name] = describe(methods[name])
        else:
            found[owner][name] = describe(source.find(modules[owner], name)[1])
    getter = methods["get_fp8_meta_tensors"]
    return {
        "transformer_engine": VERSION,
        "renew": f"python {Path(__file__).relative_to(ROOT).as_posix()}",
        **{owner: dict(sorted(names.items())) for owner, names in found.items()},
        "scale_keys": re.findall(r"'(scaling_\w+)'", ast.unparse(getter)),
        "scale_order": re.findall(r"\.(\w+)\.clone\(\)", ast.unparse(getter)),
        "slots": _slots(methods["get_quantizer_roles"]),
        "extra_state": sorted({"get_extra_state", "set_extra_state"} & set(methods)),
        "keeps_weights": re.findall(r"cache_name = .*", source.text(f"{PACKAGE}.pytorch.module.linear")),
    }  # fmt: skip


def _slots(roles: ast.FunctionDef) -> list[list[str]]:
    """The tensors that te.Linear casts in forward and in backward, in the order of their scales."""
    lists = [
        node.value for node in ast.walk(roles) if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    ]
    return [
        [
            next((ast.literal_eval(word.value) for word in item.keywords if word.arg == "tensor_type"), "")
            if isinstance(item, ast.Call)
            else ast.unparse(item)
            for item in found.elts
        ]
        for found in lists
    ]


def fetch() -> Path:
    """The wheel, by pip, once."""
    wheel = CACHE / f"transformer_engine-{VERSION}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary", ":all:", "--dest", str(CACHE), f"transformer-engine=={VERSION}"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode or not wheel.exists():
            raise FileNotFoundError(f"pip cannot fetch transformer-engine {VERSION}: {done.stderr.strip()[-200:]}")
    return wheel


@pytest.fixture(scope="module")
def source() -> Source:
    try:
        return Source(fetch())
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def test_the_record_is_what_the_source_says(source, record):
    assert make_record(source) == record


def test_every_name_and_argument_that_we_use_exists(record):
    seen = 0
    for owner, name, call in used():
        if name.startswith("__"):
            continue
        assert name in record[owner], f"TransformerEngine {VERSION} has no {owner}.{name}"
        if call is None:
            continue
        seen += 1
        known = record[owner][name]["parameters"]
        names = [parameter for parameter, _ in known]
        given = [*names[: len(call.args)], *[str(keyword.arg) for keyword in call.keywords]]
        assert len(call.args) <= len(names), f"{owner}.{name}: too many arguments"
        assert set(given) <= set(names), f"{owner}.{name} does not take {set(given) - set(names)}"
        missing = {parameter for parameter, default in known if default is None} - set(given)
        assert not missing, f"{owner}.{name} wants {missing}"
    assert seen >= 12
    formats = re.findall(r"recipe\.Format\.(\w+)", Path(ours.__file__).read_text())
    assert formats and set(formats) <= set(record["recipe"]["Format"]["members"])


def test_scales_lie_where_we_read_and_write_them(record):
    assert set(ours.META.values()) == set(record["scale_keys"])
    assert record["scale_order"] == ["scale", "amax_history"]
    forward, backward = record["slots"]
    assert [len(forward), len(backward)] == [SIZES["forward"], SIZES["backward"]]
    assert SLOTS["input"] == ("forward", forward.index("input"))
    assert SLOTS["weight"] == ("forward", forward.index("weight"))
    assert SLOTS["gradient"] == ("backward", backward.index("grad_output"))
    assert record["extra_state"] == ["get_extra_state", "set_extra_state"]
    assert record["keeps_weights"] == [
        'cache_name = None if (is_first_microbatch is None or self.is_fsdp2) else "weight"'
    ]


@pytest.fixture(scope="module")
def real_recipes(source) -> types.ModuleType:
    """TransformerEngine's own module of recipes, which needs no GPU, run from the wheel."""
    module = types.ModuleType("te_recipes")
    sys.modules["te_recipes"] = module
    exec(compile(source.text(f"{PACKAGE}.common.recipe"), "te_recipes", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_recipes_are_made_by_its_own_code_and_are_those_of_the_reference(real_recipes, name):
    made, reference = ours.make_recipe(real_recipes, name, 16), RECIPES[name]
    assert made.delayed() == reference.delayed and made.mxfp8() == (name == "mxfp8")
    formats = made.fp8_format.value
    assert formats.max_fwd == reference.formats["input"].largest == reference.formats["weight"].largest
    assert formats.max_bwd == reference.formats["gradient"].largest
    if name == "delayed":
        assert (made.margin, made.amax_history_len, made.amax_compute_algo, made.reduce_amax) == (0, 16, "max", True)
    if name == "block":
        dims = [made.x_block_scaling_dim, made.w_block_scaling_dim, made.grad_block_scaling_dim]
        assert [1 if reference.tiles[role][0] == 1 else 2 for role in ("input", "weight", "gradient")] == dims
        assert made.fp8_quant_fwd_inp.power_2_scale and made.fp8_quant_bwd_grad.amax_epsilon == 0.0
    if name == "current":
        assert not made.fp8_quant_fwd_weight.power_2_scale and made.fp8_quant_fwd_weight.amax_epsilon == 0.0
    if name == "mxfp8":
        assert not made.enable_2d_quantization and reference.tiles["weight"] == (1, 32)


@pytest.fixture(scope="module")
def real_update(source) -> Any:
    """TransformerEngine's own update of delayed scales in Python, its `unfused` path, run from the wheel."""
    wanted = ("_update_amax_history", "_default_get_amax_and_update_history", "_default_sf_compute")
    space: dict[str, Any] = {"torch": torch, "jit_fuser": lambda function: function, "Tuple": tuple}
    for node in source.tree(f"{PACKAGE}.pytorch.quantization").body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            exec(compile(ast.Module([node], []), "te_quantization", "exec"), space)

    def update(history: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> None:
        rolled, amax = space["_default_get_amax_and_update_history"](history, "max")
        space["_default_sf_compute"](amax, scale, largest, 0)
        history.copy_(rolled)

    return update


AMAX = st.floats(2.0**-126, 2.0**127, width=32) | st.sampled_from([math.inf, 1e-44, 448.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(AMAX, min_size=2, max_size=2), min_size=1, max_size=9), st.integers(1, 5))
def test_delayed_scales_are_those_of_its_own_code(real_update, passes, length):
    """Amaxes of 0 are left out: the CUDA kernel, which we follow, keeps the history then, and this path rolls it."""
    theirs = (torch.zeros(length, 2), torch.ones(2))
    own = (torch.zeros(length, 2), torch.ones(2))
    for amaxes in passes:
        for history, _ in (theirs, own):
            history[0] = torch.maximum(history[0], torch.tensor(amaxes))
        real_update(*theirs, torch.tensor(E5M2.largest))  # a Python number is divided by way of 1 / amax
        update_history(*own, (E5M2, E5M2))
        assert torch.equal(theirs[0], own[0]) and torch.equal(theirs[1], own[1])
    assert E4M3.largest == 448


def test_its_empty_shell_is_not_installed():
    assert importlib.util.find_spec(PACKAGE) is None or torch.cuda.is_available()


if __name__ == "__main__":
    RECORD.write_text(json.dumps(make_record(Source(fetch())), indent=1) + "\n")
