"""`crosstrain preflight`: the checks that a pipeline's first step makes, made here before anything is submitted.

They see what this machine sees: its credentials, and the cluster of its kubeconfig. What it cannot see is told as
not checked; the step makes the same checks with the cluster's eyes.
"""

import argparse
import sys
import tempfile

from crosstrain.components.core.findings import not_checked, summary
from crosstrain.components.core.step import load_config, load_program, select_options
from crosstrain.pipelines import parameters, run_file, spec

COMPONENT = "preflight"


def main(arguments: argparse.Namespace) -> int:
    """Print every finding, one a line; 0: no errors, 1: errors, 2: there is nothing to check."""
    file = run_file.read(arguments.file)
    pipeline = spec.load(arguments.pipeline or file.pipeline_name.replace("-", "_") or "pretrain_finetune")
    given = parameters.collect(pipeline, file.parameters, arguments.set)
    if missing := [item.name for item in pipeline.parameters.values() if item.required and item.name not in given]:
        raise ValueError(f"{pipeline.name}: not given: {', '.join(missing)}")
    values = {name: given.get(name, item.default) for name, item in pipeline.parameters.items()}
    task = next((task for task in pipeline.tasks(values) if task.component == COMPONENT), None)
    if task is None:
        raise ValueError(f"{pipeline.name}: has no step {COMPONENT}, and so nothing that it would check")
    kind = load_config(COMPONENT)
    options = {name: value for name, value in task.parameters.items() if name in kind.model_fields}
    sections = values.get("config") or {}
    chosen = select_options(COMPONENT, sections, options)
    with tempfile.TemporaryDirectory(prefix="crosstrain-preflight-") as scratch:
        root = arguments.root or scratch
        config = kind.decode({**chosen, "sections": sections, "output": root}, where=COMPONENT)
        findings = load_program(COMPONENT).check(config)
    if not arguments.root:
        findings += [
            not_checked("storage of artifacts", "where the run keeps them is not known here", "give --root URI")
        ]
    for finding in findings:
        print(finding.line)
    print(f"preflight of {pipeline.name}: {summary(findings)}", file=sys.stderr)
    return 1 if findings and findings[0].level == "error" else 0
