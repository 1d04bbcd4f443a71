"""`crosstrain new-component`: a component folder that works at once, to be made into one's own.

Into a Python package of the user's, where a component is known by its full name (`acme.steps.clean`), or into this
source tree, where it is known by its folder's. What is written is a filter of documents with its test.
"""

import argparse
import keyword
import re
from pathlib import Path
from string import Template

from crosstrain.components.core.step import COMPONENTS
from crosstrain.pipelines import compile as compiling

TEMPLATES = Path(__file__).parent / "templates"
FILES = ("__main__.py", "config.py", "program.py", "component.py")

OWN_IMAGE = '''
IMAGE = "$distribution-python:0.1.0"
"""The image `data` of crosstrain with this package installed in it; name the registry it is pulled from."""
'''


def main(arguments: argparse.Namespace) -> int:
    """Write the component and its test; say what is next."""
    folder, test, name = arguments.into / arguments.name, "", arguments.name
    _check(name, folder)
    tree = _source_tree()
    in_tree = tree is not None and arguments.into.resolve() == tree / "components"
    package = f"crosstrain.components.{name}" if in_tree else f"{package_of(arguments.into)}.{name}"
    tests = tree / "tests" / "components" / name if in_tree and tree else arguments.tests
    values = {
        "name": name,
        "package": package,
        "component": name if in_tree else package,
        "image": "images.DATA" if in_tree else "IMAGE",
        "section": "" if in_tree else "\n",
        "imports": "\nfrom crosstrain.components import images\n" if in_tree else _own_image(package),
    }
    test = tests / f"test_{name}.py"
    if test.exists():
        raise ValueError(f"{test}: is there already; choose another name")
    made = {folder / file: _fill(file, values) for file in FILES}
    made |= {folder / "__init__.py": "", test: _fill("test_component.py", values)}
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    if in_tree and tree:
        _register(tree / "components" / "core" / "step.py", name)
        print("run `crosstrain compile` for its component.yaml and README.md, then its test:")
    else:
        print(f"set IMAGE in {folder / 'component.py'}; with the package on Python's path, run its test:")
    print(f"python -m pytest {test}")
    return 0


def package_of(folder: Path) -> str:
    """The dotted name of the Python package that a folder is.

    Raises:
        ValueError: it is none.
    """
    names: list[str] = []
    here = folder.resolve()
    while (here / "__init__.py").is_file():
        names.insert(0, here.name)
        here = here.parent
    if not names:
        raise ValueError(f"{folder}: no Python package (no __init__.py); name the folder of one with --into")
    return ".".join(names)


def _check(name: str, folder: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name == "core":
        raise ValueError(f"{name!r}: a component's name is lower-case letters, digits and '_', such as clean_text")
    if name in COMPONENTS:
        raise ValueError(f"{name}: crosstrain has a component of that name; choose another")
    if folder.exists():
        raise ValueError(f"{folder}: is there already; choose another name")


def _source_tree() -> Path | None:
    try:
        return compiling.source_root()
    except ValueError:
        return None


def _own_image(package: str) -> str:
    return Template(OWN_IMAGE).substitute(distribution=package.partition(".")[0].replace("_", "-"))


def _fill(file: str, values: dict[str, str]) -> str:
    text = Template((TEMPLATES / f"{file}.txt").read_text(encoding="utf-8")).substitute(values)
    lines = text.splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.startswith("from crosstrain")]
    for place, line in zip(places, sorted(lines[place] for place in places), strict=True):
        lines[place] = line
    return "".join(lines)


def _register(step: Path, name: str) -> None:
    """Add a component to the tuple of those that the package has."""
    text, count = re.subn(
        r"(\nCOMPONENTS = \(.*?)(\n\))", rf'\1\n    "{name}",\2', step.read_text(), count=1, flags=re.S
    )
    if not count:
        raise ValueError(f"{step}: COMPONENTS was not found; add {name!r} to it")
    step.write_text(text)
    print(f"added {name} to COMPONENTS in {step}")
