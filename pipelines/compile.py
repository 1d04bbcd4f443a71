"""Compiling pipelines and components to the files that are committed, and telling which of those are stale.

Every pipeline becomes `pipelines/compiled/<name>.yaml`; every component `components/<name>/component.yaml` and
`components/<name>/README.md`. The same sources give the same bytes, so that a diff in a checkout means a change.
Left out: uploading and Kubernetes manifests.
"""

import difflib
import importlib
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from crosstrain.components.core.step import COMPONENTS
from crosstrain.pipelines import component_readme

PIPELINES = ("pretrain_finetune", "finetune", "tokenize_corpus", "fp8_study", "lora_study")
"""Modules of crosstrain.pipelines, each with a pipeline function of the same name."""


def build(names: Collection[str] = ()) -> dict[str, bytes]:
    """Compile pipelines and components.

    Args:
        names: Pipelines and components to compile; empty: all.

    Returns:
        Path relative to the source tree, to content.

    Raises:
        ValueError: no pipeline or component has such a name.
    """
    known = (*PIPELINES, *COMPONENTS)
    for name in names:
        if name not in known:
            raise ValueError(f"{name}: no such pipeline or component; known: {', '.join(known)}")
    files: dict[str, bytes] = {}
    for name in PIPELINES:
        if not names or name in names:
            function = _load(f"crosstrain.pipelines.{name}", name)
            files[f"pipelines/compiled/{name}.yaml"] = compile_function(function)
    for name in COMPONENTS:
        if not names or name in names:
            function = _load(f"crosstrain.components.{name}.component", name)
            compiled = compile_function(function)
            files[f"components/{name}/component.yaml"] = compiled
            files[f"components/{name}/README.md"] = component_readme.render(name, function, compiled).encode()
    return files


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def compile_function(function: Any) -> bytes:
    """A pipeline or component function as the bytes of its YAML."""
    from kfp.compiler import Compiler

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compiled.yaml"
        Compiler().compile(function, str(path))
        return path.read_bytes()


def source_root() -> Path:
    """The source tree that this package runs from.

    Raises:
        ValueError: it runs from an installed copy.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        raise ValueError("crosstrain runs from an installed copy, not from its source tree; say where to: --out DIR")
    return root


def write(files: Mapping[str, bytes], root: Path) -> list[str]:
    """Write what differs; the paths written, relative to `root`."""
    written = []
    for name, data in files.items():
        path = root / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            written.append(name)
    return written


def stale(files: Mapping[str, bytes], root: Path) -> list[str]:
    """One line for each file under `root` that is not what compiling gives."""
    lines = []
    for name, data in files.items():
        path = root / name
        if not path.is_file():
            lines.append(f"{name}: missing")
        elif path.read_bytes() != data:
            lines.append(f"{name}: {_first_difference(path.read_bytes(), data)}")
    return lines


def orphans(root: Path) -> list[str]:
    """One line for each compiled pipeline under `root` that no pipeline makes."""
    folder = root / "pipelines" / "compiled"
    return [
        f"pipelines/compiled/{path.name}: made by no pipeline; delete it"
        for path in sorted(folder.glob("*.yaml"))
        if path.stem not in PIPELINES
    ]


def _first_difference(old: bytes, new: bytes) -> str:
    """The first changed line, as a diff shows it."""
    before, after = (data.decode(errors="replace").splitlines() for data in (old, new))
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            removed, added = (before[i1] if i1 < i2 else ""), (after[j1] if j1 < j2 else "")
            return f"line {i1 + 1}: -{removed.strip()!r} +{added.strip()!r}"
    return "line ends differ"
