"""Compiled graphs travel between a node's folder and the store; a graph that did not compile is an error."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstrain.components.core.neuron import compile_cache
from crosstrain.components.core.storage import open_store

ENTRY = "neuronxcc-2.21.33363.0+82129205/MODULE_101+abc"


def entry(folder: Path, name: str = ENTRY, files: tuple[str, ...] = ("model.neff", "model.done")) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file in ("compile_flags.json", "model.hlo_module.pb", *files):
        (folder / name / file).write_text(f"{name} {file}")


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The wrapper in a process of its own; a stand-in for neuron_parallel_compile runs `script` in the end."""
    tools = tmp_path / "bin"
    tools.mkdir()

    def run(*arguments: str, script: str = "", temporary: str = "node") -> subprocess.CompletedProcess[str]:
        stand_in = tools / "neuron_parallel_compile"
        text = f"""\
            #!{sys.executable}
            import os, pathlib, re, subprocess, sys
            os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] = "1"
            code = subprocess.run(sys.argv[1:]).returncode
            cache = pathlib.Path(re.search(r"--cache_dir=(\\S+)", os.environ["NEURON_CC_FLAGS"])[1])
            """
        stand_in.write_text(textwrap.dedent(text) + script + "\nsys.exit(code)\n")
        stand_in.chmod(0o755)
        (tmp_path / temporary).mkdir(exist_ok=True)
        variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / temporary),
                     "NEURON_CC_FLAGS": "--model-type transformer --cache_dir=/elsewhere",
                     "NEURON_COMPILE_CACHE_URL": "/ignored"}  # fmt: skip
        module = "crosstrain.components.core.neuron.compile_cache"
        return subprocess.run([sys.executable, "-m", module, *arguments], env=variables, text=True, capture_output=True)

    return run


COMPILE = f"""
entry = cache / "{ENTRY}"
entry.mkdir(parents=True)
(entry / "model.neff").write_text("neff")
(entry / "model.done").write_text("")
(entry / "model.hlo_module.pb.lock").write_text("")
"""


def test_graphs_go_to_the_store_and_come_back_elsewhere(tmp_path, store):
    here, there = tmp_path / "here", tmp_path / "there"
    entry(here)
    entry(here, "neuronxcc-2.21.33363.0+82129205/MODULE_7+abc", files=("model.log",))  # did not compile
    (here / ENTRY / "model.lock").write_text("")
    assert compile_cache.store_new(here, store) == 1
    assert compile_cache.store_new(here, store) == 0
    keys = {item.key for item in store.list()}
    assert keys == {f"{ENTRY}/{name}" for name in ("compile_flags.json", "model.hlo_module.pb", "model.neff",
                                                   "model.done")}  # fmt: skip
    assert compile_cache.fetch(store, there) == 1
    assert compile_cache.fetch(store, there) == 0
    assert (there / ENTRY / "model.neff").read_bytes() == (here / ENTRY / "model.neff").read_bytes()


def test_an_entry_whose_upload_was_cut_short_does_not_exist(tmp_path):
    here, there, store = tmp_path / "here", tmp_path / "there", open_store(str(tmp_path / "store"))
    entry(here)
    compile_cache.store_new(here, store)
    store.delete(f"{ENTRY}/model.done")
    assert compile_cache.fetch(store, there) == 0 and not there.exists()
    assert compile_cache.store_new(here, store) == 1  # and is stored again


def test_the_compiler_is_told_one_place():
    given = {"NEURON_CC_FLAGS": "--model-type transformer --cache_dir=/tmp/a --no-cache -O1",
             "NEURON_COMPILE_CACHE_URL": "s3://b", "PATH": "/bin"}  # fmt: skip
    made = compile_cache.environment(Path("/node/graphs"), given)
    assert made == {"NEURON_CC_FLAGS": "--model-type transformer -O1 --cache_dir=/node/graphs", "PATH": "/bin"}


def test_compiling_stores_what_training_then_finds(command, tmp_path):
    cache = str(tmp_path / "store")
    show = "import os; print('trial', os.environ.get('NEURON_EXTRACT_GRAPHS_ONLY'))"
    done = command("--cache", cache, "--compile", "--", sys.executable, "-c", show, script=COMPILE)
    assert done.returncode == 0, done.stderr
    assert "trial 1" in done.stdout and "1 graphs, 1 of them new" in done.stdout
    assert {item.key for item in open_store(cache).list()} == {f"{ENTRY}/model.neff", f"{ENTRY}/model.done"}
    show = (
        "import os, pathlib, re; flags = os.environ['NEURON_CC_FLAGS'];"
        "folder = re.search(r'--cache_dir=(\\S+)', flags)[1];"
        "print(flags.count('cache_dir'), 'NEURON_COMPILE_CACHE_URL' in os.environ);"
        "print(sorted(path.name for path in pathlib.Path(folder).rglob('*') if path.is_file()))"
    )
    found = command("--cache", cache, "--", sys.executable, "-c", show, temporary="other-node")
    assert found.returncode == 0, found.stderr
    assert "1 False" in found.stdout and "['model.done', 'model.neff']" in found.stdout


@pytest.mark.parametrize("script, words", [
    ("", "the trial run found no graph to compile"),
    (COMPILE.replace('"model.neff").write_text("neff")', '"model.log").write_text("[NCC_E1] too big")'),
     "1 of 1 graphs did not compile; neuronxcc-2.21.33363.0+82129205/MODULE_101+abc: [NCC_E1] too big"),
    ("code = 3", "error: neuron_parallel_compile ended with status 3"),
])  # fmt: skip
def test_a_graph_that_did_not_compile_fails_the_step_before_training(command, tmp_path, script, words):
    done = command("--cache", str(tmp_path / "store"), "--compile", "--", "true", script=script)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert not list(open_store(str(tmp_path / "store")).list())


def test_the_trained_commands_own_status_comes_through(command, tmp_path):
    assert command("--cache", str(tmp_path / "store"), "--", "sh", "-c", "exit 7").returncode == 7
