"""The face of import_data: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def import_data(
    source: str,
    data: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    config: dict = {},  # noqa: B006
):
    """Take text files in as a corpus, where they lie.

    Args:
        source: File, folder or object-store prefix with JSONL, Parquet or plain text, also gzip or zstd.
        data: Corpus: a manifest that lists every file with size and SHA-256.
        metrics: Number of files and their bytes.
        config: Further options of this step (format, include), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    run_step("import_data", inputs={}, output=data, metrics=metrics, config=config, options={"source": source})
