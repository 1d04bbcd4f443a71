"""What the step's service account must be allowed to do, so that manifests and documentation can be held to it."""

from typing import Any

from crosstrain.components.core.launch.job import Target
from crosstrain.components.core.launch.reasons import KUEUE_GROUP, WORKLOADS
from crosstrain.components.core.launch.render import KINDS


def rules(target: Target, queue: bool = True) -> list[dict[str, Any]]:
    """Rules of a Role in the job's namespace, least privilege.

    Args:
        target: A cluster target.
        queue: Whether jobs go to a Kueue queue.
    """
    kind = KINDS[target]
    group = kind.api_version.split("/")[0]
    made: list[dict[str, Any]] = [
        {
            "apiGroups": [group],
            "resources": [kind.plural],
            "verbs": ["create", "delete", "get", "list", "patch", "watch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    ]
    if queue:
        made.append({"apiGroups": [KUEUE_GROUP], "resources": [WORKLOADS], "verbs": ["list"]})
    return made
