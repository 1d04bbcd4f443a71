"""What a step cost: wall time x nodes x the price of an hour, or no number at all.

Prices are dated user input, kept in `prices.yaml` and in files of the same layout that a user adds; no price is
a constant in code, and none is derived from another. An instance type without a price gives a reason in
place of a number. Time that bought no training (compiling, being restarted) is told apart, because it is what a
user can act on. Time in the queue is reported but costs nothing here: a job that waits holds no node. Whoever
pays for a reserved cluster around the clock pays for idle nodes besides, and no step can know that share.

Left out: storage, network, and discounts (write the price you pay into your own file).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import model_validator

from crosstrain.components.core.config import Config, NonNegativeFloat, PositiveFloat

SECONDS_PER_HOUR = 3600
TOKENS_PER_UNIT = 1_000_000


class Price(Config):
    """The price of one instance type, with where it came from."""

    usd_per_hour: PositiveFloat
    """USD for one instance and hour."""
    source: str
    """Who says so: a page, a contract, an invoice."""
    date: date
    """The day it was taken down."""
    region: str = ""
    """Region it holds in; empty: not said."""
    terms: str = ""
    """Such as "EC2 on demand" or "one-year savings plan"."""

    def provenance(self) -> str:
        """One line for a report."""
        details = ", ".join(text for text in (self.terms, self.region) if text)
        return f"{self.usd_per_hour:g} USD/h{f' ({details})' if details else ''}, {self.source}, {self.date}"


class PriceFile(Config):
    """Layout of a price file."""

    currency: Literal["USD"] = "USD"
    """Always USD: amounts are never converted."""
    prices: dict[str, Price]
    """Instance type to price; `ml.p5.48xlarge` and `p5.48xlarge` are two."""


class Timing(Config):
    """Where a step's wall time went, in seconds. Nodes are held for the wall time alone."""

    wall_seconds: NonNegativeFloat
    """From the first pod's start to the end, restarts included, the queue not."""
    queue_seconds: NonNegativeFloat = 0.0
    """Waiting for admission or for nodes, before any was held."""
    compile_seconds: NonNegativeFloat = 0.0
    """Of the wall time: compiling graphs or kernels."""
    restart_seconds: NonNegativeFloat = 0.0
    """Of the wall time: from a failure until training went on, and repeating steps since the checkpoint."""

    @model_validator(mode="after")
    def _parts_fit_the_whole(self) -> Self:
        parts = self.compile_seconds + self.restart_seconds
        if parts > self.wall_seconds and not math.isclose(parts, self.wall_seconds):
            raise ValueError(
                f"compile_seconds + restart_seconds = {parts:g} is more than wall_seconds = {self.wall_seconds:g}"
            )
        return self

    @property
    def work_seconds(self) -> float:
        """What is left for the work itself."""
        return max(0.0, self.wall_seconds - self.compile_seconds - self.restart_seconds)


@dataclass(frozen=True)
class Cost:
    """What a step cost, in USD; the three parts add up to the total."""

    usd: float
    work_usd: float
    compile_usd: float
    restart_usd: float
    node_hours: float
    queue_seconds: float
    usd_per_million_tokens: float | None
    """Of the total; None when the step processed no tokens."""
    price: Price
    instance_type: str
    nodes: int

    def metrics(self) -> dict[str, float]:
        """As a step's metrics, named for KFP's table."""
        named = {
            "cost_usd": self.usd,
            "cost_work_usd": self.work_usd,
            "cost_compile_usd": self.compile_usd,
            "cost_restart_usd": self.restart_usd,
            "node_hours": self.node_hours,
            "queue_seconds": self.queue_seconds,
        }
        if self.usd_per_million_tokens is not None:
            named["cost_usd_per_million_tokens"] = self.usd_per_million_tokens
        return named

    def provenance(self) -> str:
        """One line that says what the figures rest on."""
        return f"{self.nodes} x {self.instance_type} at {self.price.provenance()}"


@dataclass(frozen=True)
class Unpriced:
    """Why there is no cost."""

    reason: str
    timing: Timing | None = field(default=None, compare=False)

    def metrics(self) -> dict[str, float]:
        """No amount; the queue's time needs no price."""
        return {"queue_seconds": self.timing.queue_seconds} if self.timing else {}

    def provenance(self) -> str:
        """The reason."""
        return self.reason


def load_prices(own: str | Path = "") -> dict[str, Price]:
    """The packaged prices, with those of a user's file over them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not of the layout; says which entry is wrong.
    """
    packaged = files(__package__).joinpath("prices.yaml")
    prices = _decode(yaml.safe_load(packaged.read_text(encoding="utf-8")), "prices.yaml")
    if own:
        path = Path(own)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such price file; see prices.yaml in the package for its layout")
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        prices |= _decode(loaded, str(path))
    return prices


def _decode(values: Any, where: str) -> dict[str, Price]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a mapping with `prices`, found {type(values).__name__}")
    return PriceFile.decode(values, where=where).prices


def step_cost(
    instance_type: str, nodes: int, timing: Timing, tokens: int = 0, prices: Mapping[str, Price] | None = None
) -> Cost | Unpriced:
    """The cost of one step, or why it has none.

    Args:
        instance_type: As the job asked for it ("ml.p5.48xlarge"); empty for a machine that nobody named.
        nodes: Instances held for the whole wall time.
        timing: Where the time went.
        tokens: Tokens the step processed; 0: none, or not known.
        prices: As `load_prices` gives them; None: the packaged ones.

    Raises:
        ValueError: nodes below 1 or negative tokens.
    """
    if nodes < 1 or tokens < 0:
        raise ValueError(f"nodes must be at least 1 and tokens at least 0 (given {nodes} and {tokens})")
    known = load_prices() if prices is None else prices
    if not instance_type:
        return Unpriced("no cost: the instance type is not known", timing)
    if instance_type not in known:
        return Unpriced(f"no cost: no price for {instance_type}; give it in run_on.prices or in a price file", timing)
    price = known[instance_type]
    usd_per_second = nodes * price.usd_per_hour / SECONDS_PER_HOUR
    work, compiling, restarting = (
        seconds * usd_per_second for seconds in (timing.work_seconds, timing.compile_seconds, timing.restart_seconds)
    )
    total = work + compiling + restarting
    return Cost(
        usd=total,
        work_usd=work,
        compile_usd=compiling,
        restart_usd=restarting,
        node_hours=nodes * timing.wall_seconds / SECONDS_PER_HOUR,
        queue_seconds=timing.queue_seconds,
        usd_per_million_tokens=total / tokens * TOKENS_PER_UNIT if tokens else None,
        price=price,
        instance_type=instance_type,
        nodes=nodes,
    )
