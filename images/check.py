"""Build the data and submit images for real and run what is in them, without a container daemon or a registry.

    python images/check.py [--work FOLDER] [--torch-index URL]

Needs root, buildah and debootstrap (`apt-get install --no-install-recommends buildah debootstrap`). The base is a
Debian root file system made by debootstrap, in place of the published base; all else is the very Dockerfile. The
builder's pip reads this machine's pip configuration, mounted for the build and never copied into a layer.

What it does not show: that the published base works, nor anything about the gpu and neuron images.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BASE, IMAGE = "localhost/crosstrain-check-base", "localhost/crosstrain-check-"
IMAGES = ("data", "submit")
SUITE, PACKAGES = "bookworm", "ca-certificates,python3,python3-venv"
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "as", "ld", "make", "nvcc", "pip", "pip3")
SBOM_SUMMARY = (
    "import json, sys; sbom = json.load(open(sys.argv[1])); "
    "print(sbom['bomFormat'], *(part['name'] for part in sbom['components']))"
)
"""Read in the container: under load, buildah's chroot isolation has cut what a process prints after 64 KiB."""
Inside = Callable[..., str]
"""Runs words in a container and returns what they print."""
ENVIRONMENT = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}


class Failed(Exception):
    """The image is not what it promises; the message says where."""


def call(*words: object, quiet: bool = True, **options: Any) -> str:
    """Run a program; its standard output, or Failed with the end of what it said."""
    done = subprocess.run(
        [str(word) for word in words], env=ENVIRONMENT, capture_output=quiet, text=True, check=False, **options
    )
    if done.returncode:
        said = f"{done.stdout or ''}{done.stderr or ''}".strip()[-3000:]
        raise Failed(f"{' '.join(str(word) for word in words)[:200]}: status {done.returncode}\n{said}")
    return done.stdout or ""


class Buildah:
    """buildah with a storage of its own."""

    def __init__(self, work: Path) -> None:
        self._words = ("buildah", "--root", work / "storage", "--runroot", work / "run")

    def __call__(self, *words: object, quiet: bool = True) -> str:
        return call(*self._words, *words, quiet=quiet).strip()

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A working container, removed afterwards."""
        name = self("from", "--pull-never", image)
        try:
            yield name
        finally:
            self("rm", name)


def make_base(buildah: Buildah, work: Path) -> None:
    """The base image from a fresh Debian root file system, once for a work folder."""
    if BASE in buildah("images", "--format", "{{.Name}}").split():
        return
    root = work / "debian"
    shutil.rmtree(root, ignore_errors=True)
    call("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, root)
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    with buildah.container("scratch") as name:
        buildah("add", "--quiet", name, root, "/")
        buildah("commit", "--quiet", name, BASE)
    shutil.rmtree(root)


def context(folder: Path) -> None:
    """The build context: images/ and a wheel of the tree as it is, built outside of it."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "images", folder / "images", ignore=shutil.ignore_patterns("wheel", "__pycache__"))
    wheels = folder / "images" / "wheel"
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, source)


def pip_configuration(folder: Path) -> list[str]:
    """Mounts that give the builder's pip this machine's configuration, and the files that it names."""
    listed = call(sys.executable, "-m", "pip", "config", "list")
    values = dict(re.findall(r"(?m)^(?:global|:env:)\.([\w-]+)='(.*)'$", listed))
    values.pop("constraint", None)  # caps what this machine may install; the lock says more
    configuration = folder / "pip.conf"
    configuration.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    words = [word for value in values.values() for word in value.split()]
    # An index in a folder links to files beside it.
    paths = {Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word) for word in words}
    mounts = [f"{configuration}:/etc/pip.conf:ro"]
    mounts += [f"{path.resolve()}:{path}:ro" for path in sorted(paths) if path.is_absolute() and path.exists()]
    return [word for mount in mounts for word in ("--volume", mount)]


def has_torch(mounts: list[str]) -> bool:
    """Whether pip's configuration names a folder with a CPU build of torch, so that no further index is asked."""
    folders = (Path(mount.split(":")[0]) for mount in mounts)
    return any(list(folder.glob("torch-*+cpu-*.whl")) for folder in folders if folder.is_dir())


def build(buildah: Buildah, work: Path, torch_index: str | None) -> None:
    """Build the images from their Dockerfiles."""
    buildah("rm", "--all")  # what a stopped check left in this storage
    buildah("rmi", "--prune")
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        context(folder)
        mounts = pip_configuration(folder)
        if torch_index is None and has_torch(mounts):
            torch_index = ""
        arguments = [f"BASE={BASE}", "REVISION=check"]
        arguments += [] if torch_index is None else [f"TORCH_INDEX={torch_index}"]
        words = [word for argument in arguments for word in ("--build-arg", argument)]
        folder /= "images"
        for image in IMAGES:
            buildah(
                "bud", "--pull-never", "--layers=false", "--format", "docker", "--tag", IMAGE + image,
                *words, *mounts, "--file", folder / image / "Dockerfile", folder,
            )  # fmt: skip


def expect(true: bool, promise: str) -> None:
    """Print a promise that was kept, or raise."""
    if not true:
        raise Failed(f"not so: {promise}")
    print(f"  ok: {promise}", flush=True)


def inspect(buildah: Buildah) -> None:
    """What the images' own descriptions say."""
    for image in IMAGES:
        _inspect(buildah, image)


def _inspect(buildah: Buildah, image: str) -> None:
    described = json.loads(buildah("inspect", "--type", "image", IMAGE + image))
    config = described["Docker"]["config"]
    expect(config["User"] == "65532:65532", "runs as 65532:65532")
    labels = config["Labels"]
    expect(labels["org.opencontainers.image.revision"] == "check", "labels carry the revision")
    text = json.dumps(described)
    expect("PIP_" not in text and "index-url" not in text, "no pip configuration is in its description")


def look_inside(inside: Inside, image: str, packages: set[str], modules: str) -> None:
    """What every image's file system promises."""
    expect(inside("id", "-u") == "65532", "its processes are not root's")
    found = inside("sh", "-c", f"for tool in {' '.join(COMPILERS)}; do command -v $tool || true; done")
    expect(found == "", "holds no compiler, linker or pip")
    expect(inside("sh", "-c", "cat /etc/pip.conf 2>/dev/null || true") == "", "holds no pip configuration")
    form, *names = inside("python3", "-c", SBOM_SUMMARY, f"/usr/share/sbom/crosstrain-{image}.cdx.json").split()
    expect(form == "CycloneDX" and packages <= set(names), f"carries its SBOM of {len(names)} packages")
    inside("python3", "-c", f"import {modules}")
    expect(True, f"imports {modules}")


def run_submit(buildah: Buildah) -> None:
    """The submit image: the client is there, and torch is not."""
    with buildah.container(IMAGE + "submit") as container:

        def inside(*words: object) -> str:
            return buildah("run", container, "--", *words)

        look_inside(inside, "submit", {"kfp", "kfp-server-api", "crosstrain"}, "kfp, kfp_server_api, kubernetes")
        expect(inside("crosstrain", "--version").startswith("crosstrain "), "has the command")
        expect(inside("python3", "-c", "import importlib.util as u; print(u.find_spec('torch'))") == "None", "no torch")


def run_data(buildah: Buildah, work: Path) -> None:
    """The data image: run two components, the first as KFP's launcher would."""
    with tempfile.TemporaryDirectory(dir=work) as name, buildah.container(IMAGE + "data") as container:
        data = Path(name)
        data.chmod(0o777)
        (data / "text.jsonl").write_text("".join(f'{{"text": "line {n} of a small corpus"}}\n' for n in range(500)))

        def inside(*words: object) -> str:
            return buildah("run", "--volume", f"{data}:/data", container, "--", *words)

        modules = "torch, transformers, peft, tokenizers, kubernetes, psutil, pyarrow, matplotlib, scipy"
        look_inside(inside, "data", {"torch", "crosstrain", "kfp"}, modules)
        _as_the_launcher(inside, data)
        inside(
            "python3", "-m", "crosstrain.components.tokenize", "--corpus", "/data/corpus.data",
            "--output", "/data/tokens", "--vocab-size", "300",
        )  # fmt: skip
        inside(
            "python3",
            "-m",
            "crosstrain.components.preflight",
            "--output",
            "/data/checked",
            "--corpus",
            "/data/text.jsonl",
        )
        expect((data / "checked" / "manifest.json").is_file(), "checks a run before it begins")
        manifest = json.loads((data / "tokens" / "manifest.json").read_text())
        expect(manifest["facts"]["kind"] == "tokens", "tokenizes it from the command line")


def _as_the_launcher(inside: Inside, data: Path) -> None:
    """Run import_data by the command of its compiled component.yaml, with the JSON that KFP's launcher passes."""
    compiled = yaml.safe_load((ROOT / "components" / "import_data" / "component.yaml").read_text())
    (executor,) = compiled["deploymentSpec"]["executors"].values()
    (component,) = compiled["components"].values()
    outputs = {
        output: {"artifacts": [{"name": output, "type": spec["artifactType"], "uri": f"/data/{uri}", "metadata": {}}]}
        for (output, spec), uri in zip(
            sorted(component["outputDefinitions"]["artifacts"].items()), ("corpus", "metrics"), strict=True
        )
    }
    executor_input = {
        "inputs": {"parameterValues": {"source": "/data/text.jsonl", "config": {}}},
        "outputs": {"artifacts": outputs, "outputFile": "/data/executor_output.json"},
    }
    container = executor["container"]
    words = [*container["command"], *container.get("args", ())]
    text = json.dumps(executor_input)
    inside(*(text if word == "{{$}}" else word for word in words))
    manifest = json.loads((data / "corpus").read_text())
    expect(manifest["facts"]["kind"] == "corpus", "runs import_data as KFP's launcher would")


def main() -> None:
    """The command line: status 0, or 1 with what was not so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "image-check", help="storage; kept for the base")
    parser.add_argument("--torch-index", help="index of torch's CPU builds; empty: pip's own configuration finds it")
    arguments = parser.parse_args()
    if missing := [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]:
        sys.exit(f"error: {' and '.join(missing)} not installed: apt-get install buildah debootstrap")
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(work)
    try:
        for title, step in (
            ("base", lambda: make_base(buildah, work)),
            ("build", lambda: build(buildah, work, arguments.torch_index)),
            ("descriptions", lambda: inspect(buildah)),
            ("inside submit", lambda: run_submit(buildah)),
            ("inside data", lambda: run_data(buildah, work)),
            ("clean up", lambda: buildah("rmi", *(IMAGE + image for image in IMAGES))),
        ):
            started = time.monotonic()
            print(f"{title} …", flush=True)
            step()
            print(f"{title}: {time.monotonic() - started:.0f} s", flush=True)
    except Failed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
