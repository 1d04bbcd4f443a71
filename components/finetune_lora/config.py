"""Options of finetune_lora; torch-free, because help and faces read them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from crosstrain.components.core.config import (
    InputURI,
    NonNegativeFloat,
    NonNegativeInt,
    OutputURI,
    PositiveFloat,
    PositiveInt,
    StateURI,
)
from crosstrain.components.core.launch.job import RunOn
from crosstrain.components.core.launch.own_job import Placement
from crosstrain.components.core.parallel.layout import Layout
from crosstrain.components.core.training_config import TrainingOptions
from crosstrain.components.finetune_lora.neuron.options import (
    Backend,
    CompileCache,
    NeuronOptions,
    choose_backend,
)


class Config(TrainingOptions):
    """Fine-tune a model with LoRA or DoRA through peft; the output is a standard adapter folder."""

    model: InputURI
    """Model artifact to tune; its weights stay as they are."""
    data: InputURI
    """Shards artifact (continued pre-training), or a corpus of JSONL rows: prompt and completion, or chat messages."""
    output: OutputURI
    """Where the adapter goes: a prefix or folder."""
    state: StateURI = ""
    """Prefix for checkpoints; a killed run with the same options and data resumes from it. Empty: beside the
    output, at <output>.state."""
    method: Literal["lora", "dora"] = "lora"
    """lora: low-rank updates. dora: their magnitude trained apart from their direction, about a fifth slower."""
    rank: PositiveInt = 16
    """Rank of the updates: numbers trained a module are rank x (inputs + outputs)."""
    alpha: PositiveInt = 32
    """Updates are scaled by alpha / rank, or by alpha / sqrt(rank) with rslora."""
    rslora: bool = False
    """Rank-stabilised scaling, for high ranks."""
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Probability with which an input of the update is dropped in training."""
    target_modules: tuple[str, ...] = Field(("all-linear",), min_length=1)
    """Linear modules to tune, by the end of their names (q_proj); all-linear: every one but lm_head."""
    init_lora_weights: str = Field("default", pattern=r"^(default|gaussian|orthogonal|olora|pissa(_niter_[1-9]\d*)?)$")
    """How the factors begin. default, gaussian, orthogonal: the update is zero at first. pissa, pissa_niter_N (N
    iterations of a fast SVD), olora: the base's principal part is trained. These take it out of the base while
    training; what is saved is plain LoRA of twice the rank that fits the original base. With base_dtype=bfloat16 the
    rest of the base is rounded while training, and not in what is saved."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained and saved whole beside the factors, by the end of their names (embed_tokens, lm_head, norm);
    tied embeddings stay tied."""
    new_tokens: tuple[str, ...] = ()
    """Texts that become tokens of their own. Their embeddings begin at the others' mean, embed_tokens and lm_head are
    trained whole, and the tokenizer lies with the adapter. For rows, whose text is encoded here; not for shards."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the base is held in while training; what is trained is always float32."""
    base_name: str = ""
    """Name of the base model for adapter_config.json, such as a hub id; empty: made from the manifest's SHA-256."""
    prompt_field: str = "prompt"
    """JSON field of the text that is given, and not trained on."""
    completion_field: str = "completion"
    """JSON field of the text that is to be learned; EOS is put after it."""
    messages_field: str = "messages"
    """JSON field of a chat: a list of {role, content}, rendered by the model's chat template; rows that have it
    are chats, and the assistant's turns alone are trained on."""
    sequence_length: NonNegativeInt = 0
    """Longest row in tokens, more is cut off at the end; 0: 1024, or the model's maximum if that is less. Shards
    have their own."""
    packing: bool = False
    """Put several rows into one sequence of sequence_length, where they fit; they do not see each other. A sequence
    then counts as one of the batch size."""
    device: Literal["auto", "cpu", "cuda", "neuron"] = "auto"
    """Where to train; auto: a GPU where there is one, else the CPU. neuron: a NeuronCore, through TorchNeuron."""
    backend: Backend = "auto"
    """torch: plain torch and peft, on any device. optimum_neuron: optimum-neuron, on trn1 and trn2. auto: that one
    where run_on.instance_type is one of theirs and device is auto, else torch."""
    neuron: NeuronOptions = NeuronOptions()
    """For the backend optimum_neuron: tensor_parallel, pipeline_parallel, zero_1, packing…"""
    compile_cache: CompileCache = ""
    """For the backend optimum_neuron: prefix that keeps compiled graphs, which a job compiles before the training, once
    for a request. Empty: as training meets them, on every start. No part of what the work is."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate, reached after warm-up; about ten times what full fine-tuning takes."""
    warmup_steps: NonNegativeInt = 10
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay on the factors."""
    run_on: Placement = RunOn()
    """Where the training runs: in this process, or as a job of several processes or nodes (target, instance_type,
    nodes, queue, priority, volumes, …). No part of what the work is."""

    @model_validator(mode="after")
    def _tokens_are_texts(self) -> Self:
        for token in self.new_tokens:
            if not token.strip() or self.new_tokens.count(token) > 1:
                raise ValueError(f"new_tokens: {token!r} is blank or there twice")
        return self

    def neuron_layout(self, processes: int, settings: Mapping[str, Any]) -> Layout | None:
        """How the backend optimum_neuron would share a job's processes; None: another backend trains.

        Args:
            processes: Of the whole job.
            settings: The model's config.json, as far as it is known; empty: the model is not looked at.

        Raises:
            ValueError: no backend runs there, or it would ignore or break what is asked.
        """
        if choose_backend(self.backend, self.device, self.run_on) != "optimum_neuron":
            return None
        from crosstrain.components.finetune_lora.neuron import preflight  # which reads this configuration

        preflight.check_options(self, "")
        spread = preflight.plan_layout(self, processes)
        if settings:
            preflight.check_model(settings, spread, self.neuron.fuse_qkv)
        return Layout(spread.data, 1, spread.tensor, spread.pipeline, spread.micro_batch, spread.accumulation)
