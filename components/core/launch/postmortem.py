"""Which rank failed first, from the nodes' exits and the ends of their logs.

When one rank fails, the others fail a moment later for want of it, each node saying so. The first is found by
the time in torchrun's own table, else by when the container ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crosstrain.components.core.launch import failure
from crosstrain.components.core.launch.cluster import BROKEN, Cluster, Refused
from crosstrain.components.core.launch.job import Exit
from crosstrain.components.core.launch.nodes import Node

READ_NODES = 16
"""Nodes whose logs are read, the first to end first."""
READ_LINES = 500


@dataclass(frozen=True)
class FirstFailure:
    """What is said of the failure; empty where nothing is known."""

    reason: str = ""
    tail: tuple[str, ...] = ()
    exits: tuple[Exit, ...] = ()


def find_first_failure(cluster: Cluster, nodes: Sequence[Node], container: str, heard: Sequence[str]) -> FirstFailure:
    """Find the first failing rank and its last lines.

    Args:
        cluster: To read logs from.
        nodes: The job's nodes.
        container: Name of the training container.
        heard: Lines of the first node that were followed, for pods that are gone.
    """
    failed = [(node, one) for node in nodes for one in (node.ended or node.previous,) if one is not None and one.code]
    failed.sort(key=lambda pair: pair[1].finished)
    told = [_tell(cluster, node, one, container) for node, one in failed[:READ_NODES]]
    if not told:
        cause = failure.root_cause(heard)
        reason = f"rank {cause.rank} ended with exit status {cause.code}" if cause else ""
        return FirstFailure(reason, failure.tail(heard, cause.rank if cause else None))
    _, first, lines = min(told, key=lambda one: one[0])
    who = f"rank {first.rank} on node {first.node}" if first.rank is not None else f"node {first.node}"
    code = first.rank_code if first.rank_code is not None else first.code
    why = f" ({first.reason})" if first.reason not in ("", "Error", "Completed") else ""
    ended = {one.node: one for _, one, _ in told}
    exits = tuple(ended.get(node.index) or node.ended for node in nodes if node.index in ended or node.ended)
    return FirstFailure(
        reason=f"{who} ended first, with exit status {code}{why}",
        tail=failure.tail(lines, first.rank),
        exits=tuple(one for one in exits if one is not None),
    )


def _tell(cluster: Cluster, node: Node, one: Exit, container: str) -> tuple[float, Exit, list[str]]:
    """When the node's failure began, its exit with the rank filled in, and the end of its log."""
    query = {"container": container, "tailLines": str(READ_LINES)}
    if node.ended is None:
        query["previous"] = "true"
    try:
        lines = list(cluster.log(node.pod, query))
    except (Refused, PermissionError, *BROKEN) as error:
        lines = [f"(its log could not be read: {error})"]
    cause = failure.root_cause(lines)
    if cause is None:
        return one.finished, one, lines
    return cause.time, replace(one, rank=cause.rank, rank_code=cause.code), lines
