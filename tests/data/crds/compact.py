"""Make the compact schemas beside this file from full CustomResourceDefinitions: `python compact.py CRD.yaml…`.

Kept is what decides whether an object is valid; descriptions, `status` and rules in CEL are dropped. Of an
ApplicationSet's generators only those that read lists and Git remain: the others, nested in each other, are bulky.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KEPT = {
    "type", "required", "enum", "pattern", "format", "nullable",
    "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
}  # fmt: skip


def slim(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema without prose and defaults."""
    kept = {key: value for key, value in schema.items() if key in KEPT}
    if "properties" in schema:
        kept["properties"] = {name: slim(inner) for name, inner in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            kept[key] = slim(schema[key])
    return kept


def compact(path: Path) -> None:
    """Write the stored version of a definition as `<plural>.json`."""
    definition = yaml.safe_load(path.read_text())
    (version,) = (version for version in definition["spec"]["versions"] if version["storage"])
    names = definition["spec"]["names"]
    schema = slim(version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    if names["kind"] == "ApplicationSet":
        generator = schema["properties"]["spec"]["properties"]["generators"]["items"]["properties"]
        for name in set(generator) - {"git", "list"}:
            del generator[name]
    made = {
        "apiVersion": f"{definition['spec']['group']}/{version['name']}",
        "kind": names["kind"],
        "schema": schema,
    }
    text = json.dumps(made, sort_keys=True, separators=(",", ":")) + "\n"
    (Path(__file__).parent / f"{names['plural']}.json").write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        compact(Path(name))
