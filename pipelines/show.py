"""`crosstrain show`: what a run made, from raw text to the last model, with hashes, metrics and cost.

With `--verify` every object is read again and compared with its manifest. On a terminal there is a table, in a log
one line an artifact, and with `--json` one document.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from crosstrain.components.core.manifest import finite
from crosstrain.pipelines import lineage
from crosstrain.pipelines.display import duration, number, size
from crosstrain.pipelines.lineage import Found

HASH_DIGITS = 12
"""Of a SHA-256, where a person reads it."""

FACTS = ("tokens", "documents", "sequence_length", "parameters", "precision", "method", "rank", "steps", "verdict")
"""Facts of a manifest worth a place on its line."""


def main(arguments: argparse.Namespace) -> int:
    """Show what lies under the given places; 1 when something there is damaged."""
    summary = _summary(arguments.place)
    found = lineage.collect([str(place) for place in (arguments.place, *arguments.also)])
    damages = _verify(found, quiet=arguments.json) if arguments.verify else None
    if arguments.json:
        print(json.dumps(_document(summary, found, damages), indent=2, sort_keys=True, allow_nan=False))
    else:
        _print(summary, found)
    if damages is None:
        return 0
    for damage in damages:
        print(f"damaged: {damage['uri']}: {damage['damage']}", file=sys.stderr)
    objects = sum(len(one.artifact.manifest.files) for one in found)
    if damages:
        print(f"error: {len(damages)} of {objects} objects are damaged; make their artifacts again", file=sys.stderr)
        return 1
    if not arguments.json:
        print(f"verified: {objects} objects, {size(sum(one.bytes for one in found))}, all as their manifests say")
    return 0


def _summary(place: str) -> dict[str, Any]:
    """What a local run's folder tells of the run; empty for any other place."""
    path = Path(place) / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_bytes()) if "://" not in place and path.is_file() else {}
    return summary


def _verify(found: Iterable[Found], quiet: bool) -> list[dict[str, str]]:
    """Read everything; what is damaged."""
    damages = []
    for one in found:
        if not quiet:
            print(f"reading {_name(one)}: {len(one.artifact.manifest.files)} objects, {size(one.bytes)}", flush=True)
        damages += [
            {"uri": one.artifact.files.locate(file.path), "damage": damage}
            for file, damage in lineage.damaged(one)
            if damage
        ]
    return damages


def _name(one: Found) -> str:
    return f"#{one.number} {one.artifact.manifest.kind} {one.artifact.manifest.sha256[:HASH_DIGITS]}"


def _document(
    summary: Mapping[str, Any], found: Sequence[Found], damages: Sequence[Mapping[str, str]] | None
) -> dict[str, Any]:
    run = {name: summary[name] for name in ("pipeline", "status", "started", "ended", "cost") if name in summary}
    return {
        **({"run": run} if run else {}),
        "artifacts": [
            {
                "number": one.number,
                "uri": one.artifact.uri,
                "kind": one.artifact.manifest.kind,
                "component": one.artifact.manifest.component,
                "sha256": one.artifact.manifest.sha256,
                "facts": one.artifact.facts.model_dump(mode="json"),
                "options": one.artifact.manifest.options,
                "inputs": {
                    name: {"kind": source.kind, "sha256": source.sha256, "number": one.sources[name]}
                    for name, source in one.artifact.manifest.inputs.items()
                },
                "objects": len(one.artifact.manifest.files),
                "bytes": one.bytes,
                "seconds": one.record.get("seconds"),
                "metrics": finite(one.record.get("metrics", {})),
            }
            for one in found
        ],
        **({} if damages is None else {"damaged": list(damages)}),
    }


def _print(summary: Mapping[str, Any], found: Sequence[Found]) -> None:
    if summary:
        print(f"{summary['pipeline']}: {summary['status']}, started {summary['started']}")
    rows = [_row(one) for one in found]
    console = Console()
    if console.is_terminal:
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for heading in ("#", "artifact", "made by", "from", "hash", "size", "time", "what it is"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for row in rows:
            print("  ".join(item for item in row if item))
    for one in found:
        if metrics := finite(one.record.get("metrics", {})):
            print(f"#{one.number} " + "  ".join(f"{name} {number(value)}" for name, value in sorted(metrics.items())))
    for one in found:
        print(f"#{one.number} {one.artifact.uri}")
    print(_cost(summary, found))


def _row(one: Found) -> tuple[str, ...]:
    manifest, facts = one.artifact.manifest, one.artifact.facts.model_dump(mode="json")
    sources = [
        f"{name} #{there}" if there else f"{name} {manifest.inputs[name].sha256[:HASH_DIGITS]} (elsewhere)"
        for name, there in one.sources.items()
    ]
    return (
        f"#{one.number}",
        manifest.kind,
        manifest.component,
        "from " + ", ".join(sources) if sources else "",
        manifest.sha256[:HASH_DIGITS],
        size(one.bytes),
        duration(one.record["seconds"]) if "seconds" in one.record else "",
        "  ".join(f"{name.replace('_', ' ')} {_fact(facts[name])}" for name in FACTS if facts.get(name)),
    )


def _fact(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def _cost(summary: Mapping[str, Any], found: Sequence[Found]) -> str:
    """The run's cost in one line: the run's own word, else the sum over the steps that tell one."""
    if cost := summary.get("cost"):
        return f"cost: {cost['basis']}" if cost["usd"] is None else f"cost: {cost['usd']:,.2f} ({cost['basis']})"
    known = [one.record["metrics"]["cost_usd"] for one in found if "cost_usd" in one.record.get("metrics", {})]
    if not known:
        return "cost: no step ran as a job on an instance type that has a price"
    return f"cost: {sum(known):,.2f} USD, of {len(known)} of {len(found)} steps; the others have no price"
