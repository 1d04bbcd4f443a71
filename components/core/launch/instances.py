"""What nodes of an instance type have and want: `instances.yaml`, which a user's file extends.

Prices are no part of it: they are dated, and belong to whoever pays them.
"""

from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from crosstrain.components.core.config import Config, NonNegativeInt, PositiveInt

HYPERPOD_PREFIX = "ml."
"""HyperPod's nodes carry instance types as SageMaker spells them; plain EC2 nodes do without the prefix."""


class Environment(Config):
    """Variables for one kind of accelerator and its network."""

    always: dict[str, str] = Field(default_factory=dict)
    several_nodes: dict[str, str] = Field(default_factory=dict)
    """Only for jobs of more than one node."""


class Instance(Config):
    """What one node has. Counts are per node."""

    accelerator: str = ""
    """Name for reports; empty: none."""
    devices: dict[str, PositiveInt] = Field(default_factory=dict)
    """Extended resource of the accelerator's device plugin, to the count of it; at most one."""
    device_memory_gib: NonNegativeInt = 0
    """Memory of one device."""
    fp8: bool = False
    """Whether the device multiplies 8-bit floats in hardware, as TransformerEngine uses them."""
    processes: PositiveInt = 1
    vcpus: PositiveInt
    memory_gib: PositiveInt
    efa: NonNegativeInt = 0
    hugepages: str = ""
    shared_memory: str = "8Gi"
    environment: tuple[str, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_accelerator(self) -> Self:
        if len(self.devices) > 1:
            raise ValueError(f"devices: a node has one kind of accelerator, given {', '.join(self.devices)}")
        return self


class Instances(Config):
    """Every known instance type, by its EC2 name (without `ml.`), and the environments they name."""

    environments: dict[str, Environment] = Field(default_factory=dict)
    instances: dict[str, Instance] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _environments_exist(self) -> Self:
        for name, instance in self.instances.items():
            for wanted in instance.environment:
                if wanted not in self.environments:
                    known = ", ".join(self.environments)
                    raise ValueError(f"instances.{name}: unknown environment {wanted!r}; known: {known}")
        return self

    def find(self, instance_type: str) -> Instance:
        """The entry of an instance type, with or without `ml.`.

        Raises:
            ValueError: no such entry.
        """
        try:
            return self.instances[instance_type.removeprefix(HYPERPOD_PREFIX)]
        except KeyError:
            known = ", ".join(self.instances)
            raise ValueError(
                f"instance_type: {instance_type!r} is not known ({known}); describe it in a file for instances_file"
            ) from None

    def variables(self, instance: Instance, nodes: int) -> dict[str, str]:
        """The environment of a job's processes on such nodes; later entries win."""
        merged: dict[str, str] = {}
        for name in instance.environment:
            environment = self.environments[name]
            merged.update(environment.always)
            if nodes > 1:
                merged.update(environment.several_nodes)
        return {**merged, **instance.variables}


def load_instances(user_file: str = "") -> Instances:
    """Read the packaged table, and over it a user's file of the same layout: its entries replace whole entries.

    Raises:
        FileNotFoundError: the user's file is not there.
        ValueError: a file is not of the layout; the message says where.
    """
    packaged = resources.files(__package__).joinpath("instances.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(packaged)
    if user_file:
        path = Path(user_file)
        if not path.is_file():
            raise FileNotFoundError(f"instances_file: no file at {user_file}")
        own: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(own, dict):
            raise ValueError(f"{user_file}: expected a mapping with `instances` and `environments`")
        values = {**own, **{part: {**values[part], **(own.get(part) or {})} for part in values}}
    return Instances.decode(values, where=user_file or "instances.yaml")
