"""The import_model step as KFP sees it."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def import_model(
    source: str,
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    config: dict = {},  # noqa: B006
) -> None:
    """Take a plain Hugging Face model folder, prefix or hub id in: check it, hash it, write its manifest.

    Args:
        source: Folder or prefix (path, s3://, minio://) with config.json and safetensors weights, or
            hf://organization/name@commit, which is copied.
        model: Model artifact whose files stay at the source, if that is a folder or prefix.
        metrics: Parameters, files, bytes and hashing speed.
        config: Further options of this step, or a mapping of component to options.
    """
    from crosstrain.components.core.step import run_step

    run_step("import_model", inputs={}, output=model, metrics=metrics, config=config, options={"source": source})
