"""The whole chain: raw text to a pre-trained, fine-tuned, merged, proven and evaluated model.

corpus -> tokenize -> shard -> train_fp8 -+-------------> merge -> evaluate
tuning corpus -> tokenize -> shard -------+-> finetune_lora -^
"""

from kfp import dsl

from crosstrain.components.evaluate.component import evaluate
from crosstrain.components.finetune_lora.component import finetune_lora
from crosstrain.components.import_data.component import import_data
from crosstrain.components.merge.component import merge
from crosstrain.components.preflight.component import preflight
from crosstrain.components.shard.component import shard
from crosstrain.components.tokenize.component import tokenize
from crosstrain.components.train_fp8.component import train_fp8


@dsl.pipeline(name="pretrain-finetune")
def pretrain_finetune(
    corpus: str,
    tuning_corpus: str,
    vocab_size: int = 4096,
    sequence_length: int = 256,
    preset: str = "tiny",
    precision: str = "fp8",
    train_steps: int = 200,
    tune_steps: int = 60,
    margin: float = 0.0,
    seed: int = 0,
    state: str = "",
    config: dict = {},  # noqa: B006
):
    """Train a language model from raw text, fine-tune it with LoRA, merge, prove and evaluate it.

    Args:
        corpus: Text to pre-train on: a file, folder or s3:// prefix of JSONL (field "text"), Parquet or plain text.
        tuning_corpus: Text of the domain to fine-tune for; same formats. Its held-out part decides the verdict.
        vocab_size: Entries of the byte-level BPE trained on the corpus; an existing tokenizer: config.tokenize.
        sequence_length: Tokens a training sample.
        preset: Model size: tiny, 125m, 350m, 1b, 3b, 8b; any Llama config: config.train_fp8.model_config_json.
        precision: fp8, bf16 or fp32. On a CPU fp8 is emulated, and every report says so.
        train_steps: Optimizer steps of pre-training.
        tune_steps: Optimizer steps of LoRA fine-tuning.
        margin: Nats a token by which the tuned model may be worse than its base on the tuning domain and still pass.
        seed: Seed of model, shuffling and dropout.
        state: Prefix for checkpoints, so that a killed run resumes; empty keeps them beside each step's output.
        config: Further options by component, such as {"train_fp8" : {"learning_rate" : 0.001}}; they win.
    """
    checked = preflight(
        corpus=corpus,
        tuning_corpus=tuning_corpus,
        state=state,
        preset=preset,
        precision=precision,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        train_steps=train_steps,
        tune_steps=tune_steps,
        config=config,
    )
    checked.set_display_name("Preflight").set_caching_options(False)
    raw = import_data(source=corpus, config=config)
    raw.set_display_name("Import corpus").set_caching_options(False).after(checked)
    tokens = tokenize(corpus=raw.outputs["data"], vocab_size=vocab_size, config=config)
    tokens.set_display_name("Tokenize corpus")
    shards = shard(tokens=tokens.outputs["tokens"], sequence_length=sequence_length, seed=seed, config=config)
    shards.set_display_name("Shard corpus")
    base = train_fp8(
        shards=shards.outputs["shards"],
        preset=preset,
        precision=precision,
        steps=train_steps,
        seed=seed,
        state=state,
        config=config,
    )
    base.set_display_name("Pre-train")

    tuning_raw = import_data(source=tuning_corpus, config=config)
    tuning_raw.set_display_name("Import tuning corpus").set_caching_options(False).after(checked)
    tuning_tokens = tokenize(corpus=tuning_raw.outputs["data"], tokenizer=tokens.outputs["tokens"], config=config)
    tuning_tokens.set_display_name("Tokenize tuning corpus")
    tuning = shard(tokens=tuning_tokens.outputs["tokens"], sequence_length=sequence_length, seed=seed, config=config)
    tuning.set_display_name("Shard tuning corpus")
    adapter = finetune_lora(
        model=base.outputs["model"],
        data=tuning.outputs["shards"],
        steps=tune_steps,
        seed=seed,
        state=state,
        config=config,
    )
    adapter.set_display_name("Fine-tune with LoRA")
    merged = merge(model=base.outputs["model"], adapter=adapter.outputs["adapter"], config=config)
    merged.set_display_name("Merge and prove")
    evaluate(
        candidate=merged.outputs["merged"],
        baseline=base.outputs["model"],
        data=tuning.outputs["shards"],
        forgetting=shards.outputs["shards"],
        adapter=adapter.outputs["adapter"],
        margin=margin,
        config=config,
    ).set_display_name("Evaluate")
