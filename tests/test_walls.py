"""The walls of the house: who may import whom, how thin a face is, and that a built wheel is whole."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosstrain.components.core.step import COMPONENTS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "components").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")])
FACES = sorted((ROOT / "components").glob("*/component.py"))
PROGRAMS = [path for path in SOURCES if "components" in path.parts and path.name != "component.py"]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module a file imports, and whether the import stands at the top level."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def package(name: str) -> str:
    return name.split(".")[0]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_component_folder_is_listed():
    folders = {path.parent.name for path in FACES}
    assert folders == set(COMPONENTS)
    for name in COMPONENTS:
        present = {path.name for path in (ROOT / "components" / name).iterdir()}
        wanted = {
            "__init__.py",
            "__main__.py",
            "config.py",
            "program.py",
            "component.py",
            "component.yaml",
            "README.md",
        }
        assert wanted <= present, f"{name} lacks {wanted - present}"


@pytest.mark.parametrize("path", FACES, ids=relative)
def test_a_face_is_thin(path):
    assert len(path.read_text().splitlines()) <= 80
    for name, top in imports(path):
        allowed = package(name) in {"kfp", *sys.stdlib_module_names} or name.startswith("crosstrain.components.images")
        body = not top and name == "crosstrain.components.core.step.run_step"
        assert allowed or name == "crosstrain.components.images" or body, f"a face must not import {name}"


@pytest.mark.parametrize("path", PROGRAMS, ids=relative)
def test_a_program_knows_nothing_of_kfp(path):
    assert not [name for name, _ in imports(path) if package(name) in {"kfp", "kfp_kubernetes"}]


@pytest.mark.parametrize("path", PROGRAMS, ids=relative)
def test_imports_go_one_way(path):
    """Core imports libraries only; a component imports core and itself, never another component.

    Unless it is a part of that one by its name, as tokenize_join is of tokenize.
    """
    own = path.relative_to(ROOT / "components").parts[0]
    for name, _ in imports(path):
        if package(name) != "crosstrain":
            continue
        parts = name.split(".")
        assert parts[1] == "components", f"{name}: components never import pipelines"
        room = parts[2]
        reachable = {"core", "images"} if own == "core" else {"core", "images", own}
        assert room in reachable or own.startswith(f"{room}_"), f"{relative(path)} imports {name}"


@pytest.mark.parametrize("library", ["transformer_engine", "optimum"])
def test_accelerator_libraries_stay_in_their_backends(library):
    for path in SOURCES:
        if any(package(name) == library for name, _ in imports(path)):
            assert "backend" in relative(path) or "precision" in relative(path), relative(path)


def test_faces_and_configurations_import_no_torch():
    modules = [f"crosstrain.components.{name}.{part}" for name in COMPONENTS for part in ("component", "config")]
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}];"
        "print([m for m in ('torch', 'transformers', 'peft', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))], ids=relative)
def test_no_file_hides_what_is_in_it(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_readme_opens_with_the_two_commands_and_ci_runs_the_second():
    opening = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in opening and "make test" in opening
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_a_built_wheel_is_whole_and_works_elsewhere(tmp_path):
    """Sdist -> wheel -> a folder of its own: every module imports, and every data file is there."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel],
        check=True,
    )
    modules = []
    for top in ("components", "pipelines"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in {".py", ".yaml", ".json"} and "__pycache__" not in path.parts:
                installed = tmp_path / "site" / "crosstrain" / path.relative_to(ROOT)
                assert installed.is_file(), f"{relative(path)} is not in the wheel"
                assert installed.read_bytes() == path.read_bytes()
            if path.suffix == ".py" and path.name != "__main__.py":
                modules.append(
                    "crosstrain." + relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import importlib, crosstrain.components as c;"
        f"assert c.__file__.startswith({str(tmp_path)!r}), c.__file__;"
        f"[importlib.import_module(m) for m in {modules!r}]"
    )
    subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
