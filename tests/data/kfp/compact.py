"""Make v2beta1.json from KFP's OpenAPI document: `python compact.py SWAGGER.json`.

Kept is what decides whether a request or an answer is valid; descriptions, tags and titles are dropped.
"""

import json
import sys
from pathlib import Path
from typing import Any

DROPPED = {"description", "title", "summary", "tags", "default_description", "x-go-package"}


def slim(value: Any, names: bool = False) -> Any:
    """A part of the document without prose; `names`: its keys are names of properties, not keywords."""
    if isinstance(value, list):
        return [slim(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: slim(item, names=key in ("properties", "definitions") and not names)
        for key, item in value.items()
        if names or key not in DROPPED
    }


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text())
    made = {"version": document["info"]["version"], **{key: slim(document[key]) for key in ("paths",)}}
    made["definitions"] = slim(document["definitions"], names=True)
    text = json.dumps(made, sort_keys=True, separators=(",", ":")) + "\n"
    (Path(__file__).parent / "v2beta1.json").write_text(text)
