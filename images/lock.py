"""Locks of the container images, and the one place where a published digest is written down.

    python images/lock.py requirements [IMAGE …] [-- OPTIONS OF uv pip compile]
    python images/lock.py publish IMAGE sha256:… [--registry REGISTRY]
    python images/lock.py base NAME sha256:…
    python images/lock.py check

`requirements` renews the hash-pinned `requirements.lock` of each image; with the CPU build of torch, uv must be
told where it lies (`-- --find-links FOLDER` or an index). `publish` and `base` write images.lock.json, from
which the constants in components/images.py and the defaults in the Dockerfiles are made; `check` compares
them. Pushing, and asking a registry for a digest, is left to the tools that people have for it
(`docker buildx imagetools inspect`, `skopeo inspect`, `crane digest`).
"""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
LOCK = HERE / "images.lock.json"
FACES = ROOT / "components" / "images.py"
UNPUBLISHED = "sha256:" + "0" * 64
"""Default digest in a Dockerfile whose base nobody has resolved yet: no registry has it, so a build stops there."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Resolution:
    """One resolver run: what goes in, for which Python, and what is left out of the result."""

    output: str
    inputs: tuple[str, ...]
    python: str = "3.11"
    extras: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    left_out: str = ""
    """Pattern of packages that the base image or another lock provides."""


RESOLUTIONS = {
    "tools": (Resolution("tools.lock", ("tools.in",), "3.11"),),
    "data": (
        Resolution("data/requirements.lock", ("data/requirements.in",), extras=("train", "eval")),
        Resolution("data/executor.lock", ("executor.in",), options=("--no-deps",)),
    ),
    "submit": (
        Resolution(
            "submit/requirements.lock",
            ("submit/requirements.in",),
            extras=("pipelines",),
            left_out="kfp-server-api",
        ),
        Resolution("submit/source.lock", ("submit/source.in",), options=("--no-deps",)),
        Resolution("submit/build.lock", ("submit/build.in",)),
    ),
    "gpu": (
        Resolution(
            "gpu/requirements.lock",
            ("gpu/requirements.in",),
            "3.12",
            extras=("train", "eval", "gpu"),
            left_out=r"transformer-engine-torch",
        ),
        Resolution("gpu/executor.lock", ("executor.in",), "3.12", options=("--no-deps",)),
        Resolution("gpu/source.lock", ("gpu/source.in", "elastic-agent.in"), "3.12", options=("--no-deps",)),
        Resolution("gpu/build.lock", ("gpu/build.in",), "3.12"),
    ),
    "neuron": (
        Resolution(
            "neuron/requirements.lock",
            ("neuron/requirements.in",),
            constraints=("torch==2.8.0",),
            left_out=r"torch|triton|nvidia-.*|setuptools",
        ),
        Resolution("neuron/executor.lock", ("executor.in",), options=("--no-deps",)),
        Resolution("neuron/source.lock", ("elastic-agent.in",), options=("--no-deps",)),
        Resolution("neuron/build.lock", ("neuron/build.in",)),
    ),
}


def resolve(resolution: Resolution, uv_options: list[str]) -> None:
    """Run `uv pip compile` once; every line of the result carries the hashes of its files.

    Raises:
        ValueError: uv found no solution; its own words say why.
    """
    target = HERE / resolution.output
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
    command += ["--python-version", resolution.python, "--python-platform", "x86_64-manylinux_2_28"]
    command += [f"--extra={extra}" for extra in resolution.extras]
    command += [str(HERE / name) for name in resolution.inputs]
    command += [str(ROOT / "pyproject.toml")] if resolution.extras else []
    command += ["--output-file", str(target), *resolution.options, *uv_options]
    if resolution.constraints:
        command += ["--constraint", "-"]
    done = subprocess.run(command, input="\n".join(resolution.constraints), text=True, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{resolution.output}: {done.stderr.strip()}")
    sources = [*resolution.inputs, *([f"pyproject.toml[{','.join(resolution.extras)}]"] if resolution.extras else [])]
    header = f"# Made by `python images/lock.py requirements` from {', '.join(sources)}; do not edit.\n"
    target.write_text(header + _without(target.read_text(), resolution.left_out))


def _without(text: str, left_out: str) -> str:
    """A requirements text without the entries whose name matches, each with its hash lines."""
    if not left_out:
        return text
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", text)
    return "".join(entry for entry in entries if not re.fullmatch(left_out, re.split(r"[=\[ ]", entry)[0]))


def reference(lock: dict[str, Any], image: str) -> str:
    """What a pod pulls: by digest once published, by version tag before."""
    entry = lock["images"][image]
    name = f"{lock['registry']}/{entry['name']}:{lock['version']}"
    return f"{name}@{entry['digest']}" if entry["digest"] else name


def constants(lock: dict[str, Any]) -> str:
    """The lines of components/images.py that images.lock.json decides."""
    lines = [f'VERSION = "{lock["version"]}"', ""]
    for image, entry in lock["images"].items():
        lines += [f'{image.upper()} = "{reference(lock, image)}"', f'"""{entry["purpose"]}"""']
    return "\n".join(lines) + "\n"


def base_reference(lock: dict[str, Any], base: str) -> str:
    """A base image as a Dockerfile's default names it."""
    entry = lock["bases"][base]
    return f"{entry['name']}@{entry['digest'] or UNPUBLISHED}"


def dockerfile_defaults(text: str) -> dict[str, str]:
    """Base name to the default of its ARG, for the ARGs before the first FROM."""
    return {name.lower(): value for name, value in re.findall(r"(?m)^ARG (BASE\w*|BUILDER\w*)=(\S+)$", text)}


def findings(lock: dict[str, Any]) -> list[str]:
    """Where the generated constants and defaults differ from images.lock.json; empty when all agree."""
    found = []
    if constants(lock) not in FACES.read_text():
        found.append("components/images.py differs from images.lock.json: run `python images/lock.py sync`")
    for image, entry in lock["images"].items():
        defaults = dockerfile_defaults((HERE / image / "Dockerfile").read_text())
        expected = {argument: base_reference(lock, base) for argument, base in entry["bases"].items()}
        if defaults != expected:
            found.append(f"images/{image}/Dockerfile: bases {defaults} differ from images.lock.json's {expected}")
    return found


def sync(lock: dict[str, Any]) -> None:
    """Write images.lock.json, and with it the constants and the Dockerfiles' defaults."""
    LOCK.write_text(json.dumps(lock, indent=2) + "\n")
    head, _ = FACES.read_text().split("VERSION = ", 1)
    FACES.write_text(head + constants(lock))
    for image, entry in lock["images"].items():
        path = HERE / image / "Dockerfile"
        text = path.read_text()
        for argument, base in entry["bases"].items():
            text = re.sub(
                rf"(?m)^ARG {argument.upper()}=\S+$", f"ARG {argument.upper()}={base_reference(lock, base)}", text
            )
        path.write_text(text)


def _digest(text: str) -> str:
    if not DIGEST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no digest: expected sha256: and 64 hexadecimal digits")
    return text


def main() -> None:
    """The command line; status 1 with one line a finding."""
    lock = json.loads(LOCK.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    requirements = commands.add_parser("requirements")
    requirements.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(RESOLUTIONS)}; all by default")
    publish = commands.add_parser("publish")
    publish.add_argument("image", choices=list(lock["images"]))
    publish.add_argument("digest", type=_digest)
    publish.add_argument(
        "--registry", help="where the images are pulled from, such as 111122223333.dkr.ecr.…/crosstrain"
    )
    base = commands.add_parser("base")
    base.add_argument("name", choices=list(lock["bases"]))
    base.add_argument("digest", type=_digest)
    commands.add_parser("sync")
    commands.add_parser("check")
    argv, _, uv_options = _split(sys.argv[1:])
    arguments = parser.parse_args(argv)
    if arguments.command == "requirements":
        for image in arguments.images or RESOLUTIONS:
            for resolution in RESOLUTIONS[image]:
                resolve(resolution, uv_options)
    elif arguments.command == "check":
        sys.exit("\n".join(findings(lock)) or 0)
    else:
        if arguments.command == "publish":
            lock["registry"] = arguments.registry or lock["registry"]
            lock["images"][arguments.image]["digest"] = arguments.digest
        elif arguments.command == "base":
            lock["bases"][arguments.name]["digest"] = arguments.digest
        sync(lock)


def _split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], "--", argv[at + 1 :]


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
