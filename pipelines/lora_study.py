"""What LoRA saves and what it costs: LoRA and full fine-tuning of one model, over the same data and paired seeds.

model ----------------------------------+-> for each seed: finetune_full, finetune_lora -> compare_arms
corpus -> tokenize (its own) -> shard --+
"""

from kfp import dsl

from crosstrain.components.compare_arms.component import compare_arms
from crosstrain.components.finetune_full.component import finetune_full
from crosstrain.components.finetune_lora.component import finetune_lora
from crosstrain.components.import_data.component import import_data
from crosstrain.components.import_model.component import import_model
from crosstrain.components.preflight.component import preflight
from crosstrain.components.shard.component import shard
from crosstrain.components.tokenize.component import tokenize


@dsl.pipeline(name="lora-study")
def lora_study(
    model: str,
    corpus: str,
    sequence_length: int = 256,
    method: str = "lora",
    rank: int = 16,
    seeds: list = [0, 1, 2, 3],  # noqa: B006
    steps: int = 50,
    margin_percent: float = 1.0,
    state: str = "",
    config: dict = {},  # noqa: B006
):
    """Fine-tune a model with LoRA and in full on the same data, and compare quality, time, memory and cost.

    Args:
        model: Model to start from: a Hugging Face folder or s3:// prefix with safetensors and its tokenizer.
        corpus: Text to tune on: a file, folder or s3:// prefix of JSONL (field "text"), Parquet or plain text.
        sequence_length: Tokens a training sample; at most the model's own maximum.
        method: lora or dora.
        rank: Rank of the adapter.
        seeds: Seeds that both arms run with, at least two; with four the interval is +-1.6 standard deviations.
        steps: Optimizer steps of each run.
        margin_percent: Percent of the full tuning's held-out loss that counts as equivalent; set before the runs.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside each step's output.
        config: Further options by component, such as {"compare_arms" : {"instance_type" : "ml.trn1.32xlarge"}}.
    """
    checked = preflight(
        corpus=corpus,
        model=model,
        state=state,
        sequence_length=sequence_length,
        tune_steps=steps,
        method=method,
        rank=rank,
        config=config,
    )
    checked.set_display_name("Preflight").set_caching_options(False)
    base = import_model(source=model, config=config)
    base.set_display_name("Import model").set_caching_options(False).after(checked)
    raw = import_data(source=corpus, config=config)
    raw.set_display_name("Import corpus").set_caching_options(False).after(checked)
    tokens = tokenize(corpus=raw.outputs["data"], tokenizer=base.outputs["model"], config=config)
    tokens.set_display_name("Tokenize")
    shards = shard(tokens=tokens.outputs["tokens"], sequence_length=sequence_length, config=config)
    shards.set_display_name("Shard")
    with dsl.ParallelFor(seeds, name="seed") as seed:
        full = finetune_full(
            model=base.outputs["model"], data=shards.outputs["shards"], steps=steps, seed=seed, state=state,
            config=config,
        )  # fmt: skip
        full.set_display_name("Fine-tune in full")
        lora = finetune_lora(
            model=base.outputs["model"], data=shards.outputs["shards"], method=method, rank=rank, steps=steps,
            seed=seed, state=state, config=config,
        )  # fmt: skip
        lora.set_display_name("Fine-tune with LoRA")
    compare_arms(
        control=dsl.Collected(full.outputs["tuned"]),
        candidate=dsl.Collected(lora.outputs["adapter"]),
        study="lora",
        margin_percent=margin_percent,
        config=config,
    ).set_display_name("Compare and judge")
