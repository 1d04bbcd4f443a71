"""What FP8 costs in loss: control and FP8 arms over paired seeds, and a verdict that a reader can compute again.

corpus -> tokenize -> shard -> for each seed: train_fp8 (control), train_fp8 (FP8) -> compare_arms
"""

from kfp import dsl

from crosstrain.components.compare_arms.component import compare_arms
from crosstrain.components.import_data.component import import_data
from crosstrain.components.preflight.component import preflight
from crosstrain.components.shard.component import shard
from crosstrain.components.tokenize.component import tokenize
from crosstrain.components.train_fp8.component import train_fp8


@dsl.pipeline(name="fp8-study")
def fp8_study(
    corpus: str,
    vocab_size: int = 2048,
    sequence_length: int = 128,
    preset: str = "tiny",
    control: str = "bf16",
    candidate: str = "fp8",
    seeds: list = [0, 1, 2, 3],  # noqa: B006
    steps: int = 100,
    margin_percent: float = 1.0,
    state: str = "",
    config: dict = {},  # noqa: B006
):
    """Train the same model in BF16 and in FP8, over the same data and paired seeds, and judge the loss gap.

    On a CPU FP8 is emulated: the report then shows numerics only, and says so.

    Args:
        corpus: Text: a file, folder or s3:// prefix of JSONL (field "text"), Parquet or plain text.
        vocab_size: Ids of the byte-level BPE trained on the corpus; an existing tokenizer: config.tokenize.
        sequence_length: Tokens a training sample.
        preset: Model size: tiny, 125m, 350m, 1b, 3b, 8b; any Llama config: config.train_fp8.model_config_json.
        control: Precision of the control arm: bf16, or fp32, which isolates the rounding where FP8 is emulated in FP32.
        candidate: Precision of the arm in question: fp8; its recipe: config.train_fp8.fp8_recipe.
        seeds: Seeds that both arms run with, at least two; with four the interval is +-1.6 standard deviations.
        steps: Optimizer steps of each run.
        margin_percent: Percent of the control's held-out loss that counts as equivalent; set before the runs.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside each step's output.
        config: Further options by component, such as {"train_fp8" : {"fp8_recipe" : "rowwise"}}; for both arms.
    """
    checked = preflight(
        corpus=corpus,
        state=state,
        preset=preset,
        precision=candidate,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        train_steps=steps,
        config=config,
    )
    checked.set_display_name("Preflight").set_caching_options(False)
    raw = import_data(source=corpus, config=config)
    raw.set_display_name("Import corpus").set_caching_options(False).after(checked)
    tokens = tokenize(corpus=raw.outputs["data"], vocab_size=vocab_size, config=config)
    tokens.set_display_name("Tokenize")
    shards = shard(tokens=tokens.outputs["tokens"], sequence_length=sequence_length, config=config)
    shards.set_display_name("Shard")
    with dsl.ParallelFor(seeds, name="seed") as seed:
        usual = train_fp8(
            shards=shards.outputs["shards"], preset=preset, precision=control, steps=steps, seed=seed, state=state,
            config=config,
        )  # fmt: skip
        usual.set_display_name("Train the control")
        low = train_fp8(
            shards=shards.outputs["shards"], preset=preset, precision=candidate, steps=steps, seed=seed, state=state,
            config=config,
        )  # fmt: skip
        low.set_display_name("Train in FP8")
    compare_arms(
        control=dsl.Collected(usual.outputs["model"]),
        candidate=dsl.Collected(low.outputs["model"]),
        margin_percent=margin_percent,
        config=config,
    ).set_display_name("Compare and judge")
