"""What making the models cost, from the run.json beside each: times and money, which no manifest holds.

So they are on the page that KFP shows, and not in the artifact's own report.html, whose bytes are those of the work.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from crosstrain.components.core import report
from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.step import RECORD_NAME

UNKNOWN = "no cost: it ran in the process of the step itself, on a machine whose instance type is not known"
COLUMNS = ("", "Queue", "Run", "Compile", "Restart", "USD", "USD/million tokens")
NOTE = (
    "Wall time x nodes x the price of an hour. Time in the queue holds no node and costs nothing; compiling and "
    "restarting are told apart because they trained nothing."
)


@dataclass(frozen=True)
class StepCost:
    """What one step took, as far as it is known."""

    name: str
    """Role and component: "baseline (train_fp8)"."""
    metrics: Mapping[str, float]
    basis: str
    """What the figures rest on, or why there is none."""

    def seconds(self, name: str) -> str:
        return f"{self.metrics[name]:,.0f} s" if name in self.metrics else "–"

    def usd(self, name: str) -> str:
        return f"{self.metrics[name]:,.2f}" if name in self.metrics else "–"

    def row(self) -> list[str]:
        """As COLUMNS has it."""
        times = [self.seconds(f"{part}_seconds") for part in ("queue", "run", "compile", "restart")]
        return [self.name, *times, self.usd("cost_usd"), self.usd("cost_usd_per_million_tokens")]


def read_costs(inputs: Mapping[str, Artifact]) -> list[StepCost]:
    """The costs of the models and the adapter, each step once; one without a run.json is left out."""
    found: dict[str, StepCost] = {}
    for role in ("baseline", "adapter", "candidate"):
        if role not in inputs or (uri := inputs[role].uri) in found:
            continue
        try:
            record = json.loads(inputs[role].store.read(RECORD_NAME))
        except FileNotFoundError:
            continue
        job = record.get("job") or {}
        own = {"run_seconds": record["seconds"]} if not job else {}
        name = f"{role} ({record['component']})"
        found[uri] = StepCost(name, {**own, **record["metrics"]}, job.get("cost", UNKNOWN))
    return list(found.values())


def render_costs(costs: Sequence[StepCost]) -> Markup:
    """The section of the page."""
    table = report.table(COLUMNS, [one.row() for one in costs], numbers=range(1, len(COLUMNS)))
    told = [report.paragraph(f"{one.name}: {one.basis}.", note=True) for one in costs]
    return report.section("Cost", table, *told, report.paragraph(NOTE, note=True))


def markdown_costs(costs: Sequence[StepCost]) -> str:
    """The same for the summary."""
    lines = [f"- {report.markdown_text(f'{one.name}: {one.basis}')}" for one in costs]
    table = report.markdown_table(COLUMNS, [one.row() for one in costs])
    return f"**Cost**\n\n{table}\n" + "\n".join(lines) + "\n"
