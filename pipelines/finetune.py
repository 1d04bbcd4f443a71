"""An existing model in: LoRA on your text, merge with proof, evaluation against the original.

model ----------------------------------+-> finetune_lora -> merge -> evaluate
corpus -> tokenize (its own) -> shard --+
"""

from kfp import dsl

from crosstrain.components.evaluate.component import evaluate
from crosstrain.components.finetune_lora.component import finetune_lora
from crosstrain.components.import_data.component import import_data
from crosstrain.components.import_model.component import import_model
from crosstrain.components.merge.component import merge
from crosstrain.components.preflight.component import preflight
from crosstrain.components.shard.component import shard
from crosstrain.components.tokenize.component import tokenize


@dsl.pipeline(name="finetune")
def finetune(
    model: str,
    corpus: str,
    sequence_length: int = 1024,
    method: str = "lora",
    rank: int = 16,
    steps: int = 100,
    margin: float = 0.0,
    seed: int = 0,
    state: str = "",
    config: dict = {},  # noqa: B006
):
    """Fine-tune a Hugging Face Llama with LoRA or DoRA, merge the adapter, prove the merge and evaluate it.

    Args:
        model: Model to start from: a Hugging Face folder or s3:// prefix with safetensors and its tokenizer, or
            hf://organization/name@commit.
        corpus: Text to tune on: a file, folder or s3:// prefix of JSONL (field "text"), Parquet or plain text.
        sequence_length: Tokens a training sample; at most the model's own maximum.
        method: lora or dora.
        rank: Rank of the adapter.
        steps: Optimizer steps.
        margin: Nats a token by which the tuned model may be worse than the original and still pass.
        seed: Seed of adapter initialisation, shuffling and dropout.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside each step's output.
        config: Further options by component, such as {"finetune_lora" : {"alpha" : 32}}; they win.
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
    shards = shard(tokens=tokens.outputs["tokens"], sequence_length=sequence_length, seed=seed, config=config)
    shards.set_display_name("Shard")
    adapter = finetune_lora(
        model=base.outputs["model"],
        data=shards.outputs["shards"],
        method=method,
        rank=rank,
        steps=steps,
        seed=seed,
        state=state,
        config=config,
    )
    adapter.set_display_name("Fine-tune")
    merged = merge(model=base.outputs["model"], adapter=adapter.outputs["adapter"], config=config)
    merged.set_display_name("Merge and prove")
    evaluate(
        candidate=merged.outputs["merged"],
        baseline=base.outputs["model"],
        data=shards.outputs["shards"],
        adapter=adapter.outputs["adapter"],
        margin=margin,
        config=config,
    ).set_display_name("Evaluate")
