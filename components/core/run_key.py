"""The name of a run: what it computes, never where it writes. Apart from checkpoints, which need a recent torch."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from crosstrain.components.core.manifest import Source


def run_key(component: str, options: Mapping[str, Any], inputs: Mapping[str, Source]) -> str:
    """The name of a run: SHA-256 over component, options that decide the trajectory, and input manifests."""
    identity = {
        "component": component,
        "options": dict(options),
        "inputs": {name: source.sha256 for name, source in inputs.items()},
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, allow_nan=False).encode()).hexdigest()
