"""What is passed to optimum-neuron, as plain values: every keyword is checked against its classes in the tests.

Torch-free. Sequence parallelism is always off: with it, the factors that every rank holds whole miss the sum of their
gradients in 0.4.5, and what is saved is not what was trained. Nothing here has been run on Trainium.
"""

from typing import Any

from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.neuron.preflight import Layout


def trainer_arguments(config: Config, layout: Layout, folder: str, length: int, trial: bool) -> dict[str, Any]:
    """Keywords of NeuronSFTConfig.

    Args:
        config: The request.
        layout: How it is spread.
        folder: Where checkpoints go, on the node's own disk.
        length: Tokens a sequence.
        trial: Whether this run only finds the graphs to compile.
    """
    neuron = config.neuron
    checkpointing = {"use_reentrant": True} if neuron.gradient_checkpointing else None
    return {
        "output_dir": folder,
        "do_train": True,
        "max_steps": min(config.steps, neuron.precompile_steps) if trial else config.steps,
        "per_device_train_batch_size": layout.micro_batch,
        "per_device_eval_batch_size": layout.micro_batch,  # checked against the pipeline's pieces, and else unused
        "gradient_accumulation_steps": layout.accumulation,
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.beta1,
        "adam_beta2": config.beta2,
        "adam_epsilon": config.adam_epsilon,
        "max_grad_norm": config.clip_norm,
        "seed": config.seed,
        "bf16": config.base_dtype == "bfloat16",
        "logging_strategy": "steps",
        "logging_steps": 1 if trial else config.log_every,
        "logging_first_step": True,
        "save_strategy": "no" if trial else "steps",
        "save_steps": config.checkpoint_every,
        "save_total_limit": 1,
        "save_only_model": True,
        "report_to": "none",
        "disable_tqdm": True,
        "skip_cache_push": True,
        "gradient_checkpointing": neuron.gradient_checkpointing,
        "gradient_checkpointing_kwargs": checkpointing,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "pipeline_parallel_num_microbatches": neuron.pipeline_microbatches or -1,
        "disable_sequence_parallel": True,
        "zero_1": neuron.zero_1,
        "fuse_qkv": neuron.fuse_qkv,
        "use_xser": False,
        "async_save": False,
        "max_length": length,
        "packing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }


def model_arguments(config: Config) -> dict[str, Any]:
    """Keywords of NeuronModelForCausalLM.from_pretrained beside the folder and the parallel configuration."""
    return {
        "dtype": config.base_dtype,
        "attn_implementation": "flash_attention_2" if config.neuron.flash_attention else "eager",
        "local_files_only": True,
    }


def lora_arguments(config: Config, targets: list[str]) -> dict[str, Any]:
    """Keywords of peft's LoraConfig."""
    return {
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "use_rslora": config.rslora,
        "init_lora_weights": True if config.init_lora_weights == "default" else config.init_lora_weights,
        "bias": "none",
    }
