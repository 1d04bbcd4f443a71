"""Every page keeps its word: links lead somewhere, commands are ones that exist, and what can run here is run."""

import importlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from crosstrain.components.core.step import load_config
from crosstrain.pipelines import cli, parameters, run_file, spec

ROOT = Path(__file__).resolve().parents[2]
WAYS = [f"docs/{name}.md" for name in ("laptop", "kfp-ui", "gitops", "reuse", "write-a-component", "api")]
PAGES = ["README.md", "CONTRIBUTING.md", *WAYS]
Blocks = Callable[[str, str], list[str]]


def commands(page: str) -> Iterator[list[str]]:
    """The words of every shell command on a page."""
    text = (ROOT / page).read_text()
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("page", WAYS)
def test_the_readme_links_to_every_page(page: str) -> None:
    assert f"({page})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    named = set(re.findall(r"(?<![\w/.])(?:manifests|pipelines|docs|components/core)/[\w./-]*\w", text))
    assert [name for name in named if not (ROOT / name).exists()] == []
    for module in re.findall(r"`(crosstrain(?:\.\w+)+)`", text):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "-")
def test_every_command_is_one_that_exists(page: str, words: list[str], kubectl_options: set[str]) -> None:
    program, *rest = words
    if program == "crosstrain":
        check_own(rest)
    elif program == "make":
        assert re.search(rf"^{rest[0]}[ :]", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "kubectl":
        assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= kubectl_options
        for folder in (after for before, after in itertools.pairwise(rest) if before in ("-k", "kustomize")):
            assert folder.startswith("https://") or (ROOT / folder / "kustomization.yaml").is_file()
    elif words[:2] == ["python", "-m"]:
        check_module(rest[1], rest[2:])
    else:
        assert program in ("mkdir", "touch", "export", "git"), f"{program}: write a check for it"


def check_own(words: list[str]) -> None:
    """The command's own parser takes the words, and the pipeline knows the parameters."""
    if "--help" in words:
        return
    arguments = cli._parser().parse_args(words)
    name = getattr(arguments, "pipeline", None)
    if not isinstance(name, str) or name not in spec.committed():
        return
    pipeline = spec.load(name)
    given = parameters.collect(pipeline, {}, [text for text in arguments.set if not text.startswith("config.")])
    needed = {item.name for item in pipeline.parameters.values() if item.required}
    assert arguments.file or needed <= set(given), f"{name}: not given: {needed - set(given)}"


def check_module(module: str, rest: list[str]) -> None:
    if module.startswith("crosstrain.components."):
        known = {f"--{name.replace('_', '-')}" for name in load_config(module.rpartition(".")[2]).model_fields}
        assert {word for word in rest if word.startswith("--")} <= known | {"--help"}
    else:
        assert module.startswith(("acme.", "crosstrain.")) or module in ("pip", "pytest", "venv", "pdoc"), module


@pytest.fixture(scope="session")
def kubectl_options() -> set[str]:
    """Every option of the kubectl commands that pages use."""
    texts = [
        subprocess.run(["kubectl", *verb, "--help"], capture_output=True, text=True, check=True, env=_path()).stdout
        for verb in (["apply"], ["kustomize"], ["port-forward"], ["create", "secret", "generic"], ["get"], ["logs"])
    ]
    texts.append(subprocess.run(["kubectl", "options"], capture_output=True, text=True, check=True, env=_path()).stdout)
    found = re.findall(r"(?m)^\s+(?:(-\w), )?(--[a-z-]+)", "\n".join(texts))
    return {option for pair in found for option in pair if option}


def _path() -> dict[str, str]:
    """The environment with this Python's own programs first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("page", ["docs/laptop.md", "docs/kfp-ui.md"])
def test_run_files_on_a_page_fit_the_pipeline(blocks: Blocks, page: str, tmp_path: Path) -> None:
    (text,) = blocks(page, "yaml")
    (tmp_path / "run.yaml").write_text(text)
    pipeline = spec.load("pretrain_finetune")
    parameters.fill(pipeline, parameters.collect(pipeline, run_file.read(tmp_path / "run.yaml").parameters, ()))


def execute(words: list[str], folder: Path) -> str:
    """Run a command as it stands on the page."""
    start = {"crosstrain": [sys.executable, "-c", "from crosstrain.pipelines.cli import main; main()"]}
    start["python"] = [sys.executable]
    done = subprocess.run(
        [*start.get(words[0], words[:1]), *words[1:]],
        capture_output=True, text=True, cwd=folder, env={**_path(), "PYTHONPATH": str(folder)}, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_first_run_on_the_laptop_page(tmp_path: Path) -> None:
    """As it stands there, on fewer documents."""
    words = list(commands("docs/laptop.md"))
    execute(next(line for line in words if "crosstrain.pipelines.demo_corpus" in line), tmp_path)
    corpus = tmp_path / "corpora" / "python.jsonl"
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:100]))
    lines = [line for line in words if "tokenize_corpus" in line or "show" in line]
    assert [line[1] for line in lines] == ["run", "run", "show", "show"]
    told = [execute(line, tmp_path) for line in lines]
    assert "partitions" in told[0] and "Join partitions" in told[1]
    assert "shards  shard" in told[2] and told[3].splitlines()[-1].startswith("verified: ")
    assert {path.name for path in (tmp_path / "runs" / "shards").iterdir()} >= {
        "summary.json", "pipeline.yaml", "artifacts", "logs",
    }  # fmt: skip


@pytest.mark.slow
def test_the_component_page_from_the_first_command_to_a_run(
    blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaffold, its test, its help, and the pipeline on the page, compiled and run."""
    first, _ = blocks("docs/write-a-component.md", "sh")
    told = [execute(shlex.split(line), tmp_path) for line in first.splitlines()]
    assert "passed" in told[3] and "--minimum-characters" in told[4]
    script = tmp_path / "clean_tokens.py"
    script.write_text(
        blocks("docs/write-a-component.md", "python")[0]
        + '\n\nfrom kfp.compiler import Compiler\nCompiler().compile(clean_tokens, "clean_tokens.yaml")\n'
    )
    execute(["python", "clean_tokens.py"], tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {n} of some words"}}\n' for n in range(50)))
    settings = ["--set", "source=text.jsonl", "--set", 'config={"acme.steps.clean_text": {"text_field": "text"}}']
    told = execute(["crosstrain", "run", "clean_tokens.yaml", *settings, "--out", "out"], tmp_path)
    assert "clean-text" in told
    show = execute(["crosstrain", "show", "out"], tmp_path)
    assert "acme.steps.clean_text" in show


def test_the_reference_is_made_from_docstrings(tmp_path: Path) -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m pdoc" in line]
    options = shlex.split(line.partition("pdoc ")[2])
    assert {"crosstrain.components", "crosstrain.pipelines"} <= set(options)
    done = subprocess.run(
        [sys.executable, "-m", "pdoc", "-d", "google", "-o", tmp_path, "crosstrain.pipelines.lineage"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "crosstrain" / "pipelines" / "lineage.html").read_text()
    assert "inputs before outputs" in page


def test_modules_of_the_reference_page_explain_themselves() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for module in re.findall(r"^\| `(crosstrain[\w.]+)` \|", text, re.MULTILINE):
        loaded: Any = importlib.import_module(module)
        assert loaded.__doc__, module


def test_examples_in_yaml_are_yaml(blocks: Blocks) -> None:
    for page in PAGES:
        for text in blocks(page, "yaml"):
            assert list(yaml.safe_load_all(text)), page
