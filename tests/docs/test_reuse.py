"""docs/reuse.md: the pipeline on the page runs, a component comes from a URL, and programs need no kfp."""

import functools
import http.server
import importlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crosstrain.components.core.step import COMPONENTS, load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/reuse.md"
Blocks = Callable[[str, str], list[str]]


@pytest.mark.slow
def test_the_pipeline_on_the_page_runs_under_kfps_local_runner(blocks: Blocks, llama: Path, tmp_path: Path) -> None:
    """In a process and a file of its own: kfp reads a component's source from its file."""
    pipeline, run = blocks(PAGE, "python")[:2]
    script = tmp_path / "tickets.py"
    assert "my/llama" in run and "/tmp/tickets" in run
    script.write_text(pipeline + run.replace("my/llama", str(llama)).replace("/tmp/tickets", str(tmp_path / "work")))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True, text=True, cwd=tmp_path, timeout=500,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    from transformers import AutoModelForCausalLM

    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "release")
    base = AutoModelForCausalLM.from_pretrained(llama)
    assert any(not (a == b).all() for a, b in zip(tuned.parameters(), base.parameters(), strict=True)), "not tuned"


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_can_be_imported_by_name_and_called(name: str, tmp_path: Path) -> None:
    """Whatever was imported before: the name is the package, and calling it adds the step."""
    from kfp import dsl
    from kfp.compiler import Compiler

    package = importlib.import_module("crosstrain.components")
    component: Any = getattr(importlib.import_module(f"crosstrain.components.{name}.component"), name)
    by_name: Any = getattr(package, name)
    assert by_name is sys.modules[f"crosstrain.components.{name}"], "the name hides the package"
    assert by_name.component_spec is component.component_spec and by_name.python_func is component.python_func
    needed = {key: spec for key, spec in (component.component_spec.inputs or {}).items() if not spec.optional}
    if any(spec.is_artifact_list for spec in needed.values()):
        return  # a list of artifacts comes from a loop alone

    @dsl.pipeline(name="theirs")
    def theirs() -> None:
        artifact = dsl.importer(artifact_uri="s3://b/k", artifact_class=dsl.Artifact).output
        values = {"Integer": 1, "String": "a"}
        by_name(**{key: values.get(spec.type, artifact) for key, spec in needed.items()})

    Compiler().compile(theirs, str(tmp_path / "theirs.yaml"), type_check=False)
    assert f"comp-{name.replace('_', '-')}" in (tmp_path / "theirs.yaml").read_text()


def test_importing_the_names_imports_no_kfp() -> None:
    code = (
        f"import sys; from crosstrain.components import {', '.join(COMPONENTS)}; import crosstrain.components as c;"
        "import crosstrain.components.merge.config as config; assert merge.config is config and callable(merge);"
        "assert not callable(c.core if hasattr(c, 'core') else None); assert 'kfp' not in sys.modules;"
        "\ntry: merge.nothing\nexcept AttributeError as error: print(error)\n"
        "assert 'kfp' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'crosstrain.components.merge' has no attribute 'nothing'\n"


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    """The tree over HTTP, as a raw address of the repository serves it."""
    handler = functools.partial(_Quiet, directory=str(ROOT))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


def test_the_page_loads_a_component_from_a_url(blocks: Blocks, base: str) -> None:
    names: dict[str, Any] = {"BASE": base}
    exec(blocks(PAGE, "python")[2], names)
    assert names["merge"].name == "merge"


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_committed_component_loads_from_a_url(base: str, name: str) -> None:
    from kfp import components

    loaded = components.load_component_from_url(f"{base}/components/{name}/component.yaml")
    face = getattr(importlib.import_module(f"crosstrain.components.{name}.component"), name)
    assert set(loaded.component_spec.inputs) == set(face.component_spec.inputs)
    assert set(loaded.component_spec.outputs) == set(face.component_spec.outputs)


def test_every_program_starts_without_kfp(without_kfp: dict[str, str]) -> None:
    modules = [f"crosstrain.components.{name}.program" for name in COMPONENTS]
    code = (
        "import importlib\ntry: import kfp\nexcept ModuleNotFoundError: print('blocked')\n"
        f"for module in {modules!r}: importlib.import_module(module)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=without_kfp)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "blocked\n"


@pytest.mark.slow
def test_the_programs_on_the_page_run_without_kfp(
    blocks: Blocks, without_kfp: dict[str, str], llama: Path, tmp_path: Path
) -> None:
    (lines,) = [text for text in blocks(PAGE, "sh") if "python -m" in text]
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "llama").symlink_to(llama)
    rows = [f'{{"prompt": "Ticket {n}: the pump is loud.", "completion": "Check valve {n % 7}."}}\n' for n in range(20)]
    (tmp_path / "my" / "tickets.jsonl").write_text("".join(rows))
    for line in lines.splitlines():
        _, *words = shlex.split(line)
        words = ["2" if word == "20" else word for word in words]
        if "finetune_lora" in line:
            words += ["--sequence-length", "64"]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=without_kfp, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "merged").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "work" / "merged")("the pump").input_ids


def test_the_commands_on_the_page_are_ones_that_the_programs_take(blocks: Blocks) -> None:
    for line in "\n".join(blocks(PAGE, "sh")).splitlines():
        words = shlex.split(line)
        if words[:2] == ["python", "-m"]:
            fields = load_config(words[2].rpartition(".")[2]).model_fields
            assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} <= set(fields)
