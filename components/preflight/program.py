"""Preflight: every check that can be made before a run, in one go, and every finding at once.

Imports neither torch nor transformers: it is the first step of each pipeline and should take a second. Left out on
purpose: whether the data are good (the steps that read them tell), and anything that would cost accelerator time.
"""

import logging

from crosstrain.components.core.artifact import ArtifactWriter
from crosstrain.components.core.findings import Finding, count, ordered, summary
from crosstrain.components.core.manifest import PreflightFacts
from crosstrain.components.core.step import Result
from crosstrain.components.preflight.config import Config
from crosstrain.components.preflight.machines import check_device, check_layout, check_memory
from crosstrain.components.preflight.places import check_credentials, check_disk, check_storage
from crosstrain.components.preflight.registries import check_images
from crosstrain.components.preflight.work import trainings

log = logging.getLogger(__name__)

CHECKS = ("configuration", "storage", "credentials", "layout", "device", "memory", "disk", "cluster", "images")


def run(config: Config) -> Result:
    """Check a run and write that it was checked.

    Raises:
        ValueError: there are errors; all findings, one a line.
    """
    findings = check(config)
    for finding in findings:
        log.log(logging.ERROR if finding.level == "error" else logging.WARNING, "%s", finding.line)
    counted = count(findings)
    if counted["error"]:
        listed = "\n".join(f"  {finding.line}" for finding in findings)
        raise ValueError(f"preflight found {summary(findings)}:\n{listed}")
    with ArtifactWriter(config.output) as out:
        artifact = out.commit("preflight", PreflightFacts(checks=CHECKS), config.options(), {})
    metrics: dict[str, float] = {"warnings": counted["warning"], "not_checked": counted["not checked"]}
    return Result(artifact, metrics, markdown=_markdown(findings))


def check(config: Config) -> list[Finding]:
    """Every finding, errors first; nothing is left behind."""
    found, findings = trainings(config)
    credentials = list(check_credentials(config))
    usable = not any(finding.level == "error" for finding in credentials)
    findings += [*credentials, *check_storage(config, usable), *check_disk(config, found)]
    for training in found:
        findings += [*check_layout(training), *check_device(training), *check_memory(training)]
        if training.on_cluster:
            from crosstrain.components.core.launch.ready import check_cluster

            findings += check_cluster(training.run_on, training.component)
    findings += check_images(found)
    return ordered(findings)


def _markdown(findings: list[Finding]) -> str:
    lines = [f"- **{one.level}** {one.where}: {one.what}{f'; {one.advice}' if one.advice else ''}" for one in findings]
    return "\n".join([f"# Preflight: {summary(findings)}", "", *(lines or ["Nothing was found."])]) + "\n"
