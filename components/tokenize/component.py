"""The face of tokenize: what KFP sees."""

from kfp import dsl

from crosstrain.components import images


@dsl.component(base_image=images.DATA, install_kfp_package=False)
def tokenize(
    corpus: dsl.Input[dsl.Dataset],
    tokens: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    tokenizer: dsl.Input[dsl.Artifact] = None,
    vocab_size: int = 0,
    config: dict = {},  # noqa: B006
):
    """Turn a corpus of text into token documents.

    Args:
        corpus: Corpus, made by import_data.
        tokens: Token documents as Megatron .bin/.idx pairs, with their tokenizer.
        metrics: Documents by fate, tokens, tokens a second, bytes a token.
        tokenizer: Tokens, shards or model whose tokenizer is used; none: config.tokenizer_uri, else one is trained.
        vocab_size: Ids of the byte-level BPE to train when no tokenizer is given; at least 258.
        config: Further options of this step (text_field, on_invalid, …), or of the whole pipeline by step.
    """
    from crosstrain.components.core.step import run_step

    run_step(
        "tokenize",
        inputs={"corpus": corpus, "tokenizer": tokenizer},
        output=tokens,
        metrics=metrics,
        config=config,
        options={"vocab_size": vocab_size},
    )
