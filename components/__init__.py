"""The components: `from crosstrain.components import merge` gives a package that is a KFP component too.

`merge` names a folder of Python modules, which `python -m crosstrain.components.merge` and
`import crosstrain.components.merge.config` need, and the step that a pipeline author wants to call. One name cannot
be two objects without one of them hiding the other, depending on who imported what first. So the package itself can
be called: `merge(model=…, adapter=…)` in a pipeline calls the component of `merge/component.py`. That module, and
kfp with it, is imported when the component is first used and not before, so that programs run without kfp. Where an
instance of kfp's own class is needed, as by kfp's compiler, take `crosstrain.components.merge.component.merge`.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_FACE = ("component_spec", "pipeline_spec", "platform_spec", "python_func", "description")
"""Attributes of a kfp component that the package passes on; any other name is looked up in the package alone."""


class _ComponentPackage(ModuleType):
    """A component's package, which can be called in a pipeline."""

    def __call__(self, **arguments: Any) -> Any:
        """Add a step of this component to the pipeline that is being defined; arguments as in its README."""
        return _face(self)(**arguments)

    def __getattr__(self, name: str) -> Any:
        if name in _FACE:
            return getattr(_face(self), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Components(ModuleType):
    """The type of this package: a component's package that is imported here becomes callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        package = isinstance(value, ModuleType) and hasattr(value, "__path__")
        if package and importlib.util.find_spec(f"{value.__name__}.component") is not None:
            value.__class__ = _ComponentPackage
        super().__setattr__(name, value)


def _face(package: ModuleType) -> Any:
    name = package.__name__
    return getattr(importlib.import_module(f"{name}.component"), name.rpartition(".")[2])


sys.modules[__name__].__class__ = _Components
