"""The custom resource of a job on a cluster, for whichever target it names, and what tells one job from another."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from crosstrain.components.core.launch import render_hyperpod, render_pytorchjob, render_trainjob
from crosstrain.components.core.launch.job import Job, Target
from crosstrain.components.core.launch.plan import plan

IDENTITY_ANNOTATION = "crosstrain/job-sha256"
"""Digest of the job as rendered: a step adopts the job of its name only if they agree."""


@dataclass(frozen=True)
class Kind:
    """A target's custom resource, and what finds its pods' training container and nodes."""

    api_version: str
    plural: str
    container: str


KINDS: dict[Target, Kind] = {
    "hyperpod": Kind(render_hyperpod.API_VERSION, render_hyperpod.PLURAL, render_hyperpod.CONTAINER),
    "trainjob": Kind(render_trainjob.API_VERSION, render_trainjob.PLURAL, render_trainjob.CONTAINER),
    "pytorchjob": Kind(render_pytorchjob.API_VERSION, render_pytorchjob.PLURAL, render_pytorchjob.CONTAINER),
}


def render(job: Job, kind: str = "") -> dict[str, Any]:
    """The custom resource of a job, without namespace and owner.

    Args:
        job: What to run, on a cluster target.
        kind: How the cluster spells the kind; empty: as documented.

    Raises:
        ValueError: the job's settings contradict one another, or lack an image.
        FileNotFoundError: the user's file of instance types is not there.
    """
    pods = plan(job)
    if job.run_on.target == "hyperpod":
        made = render_hyperpod.render(job, pods)
    elif job.run_on.target == "trainjob":
        made = render_trainjob.render(job, pods)
    elif job.run_on.target == "pytorchjob":
        made = render_pytorchjob.render(job, pods)
    else:
        raise ValueError("run_on.target: local runs on this machine and has no custom resource")
    text = json.dumps(made, sort_keys=True, separators=(",", ":"))
    made["metadata"].setdefault("annotations", {})[IDENTITY_ANNOTATION] = hashlib.sha256(text.encode()).hexdigest()
    return {**made, "kind": kind or made["kind"]}
