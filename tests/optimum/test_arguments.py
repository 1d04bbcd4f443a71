"""Every keyword that we pass exists in optimum-neuron 0.4.5, its own classes take it, and mean by it what we mean."""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from crosstrain.components.core.optimization import learning_rate
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.neuron import backend
from crosstrain.components.finetune_lora.neuron.arguments import lora_arguments, model_arguments, trainer_arguments
from crosstrain.components.finetune_lora.neuron.preflight import Layout, compatible_settings

ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
"""Of Llama-3.2-1B."""


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """What torchrun would have set up."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def config(**options: Any) -> Config:
    return Config.decode({"model": "m", "data": "d", "output": "o", "base_dtype": "bfloat16", **options})


def built(tmp_path: Path, options: dict[str, Any], layout: Layout, trial: bool = False) -> Any:
    from optimum.neuron import NeuronSFTConfig

    return NeuronSFTConfig(**trainer_arguments(config(**options), layout, str(tmp_path / "out"), 128, trial))


def test_sequence_parallelism_is_off_and_says_so_in_the_libraries_own_configuration(tmp_path, sizes):
    sizes.tensor = 8
    made = built(tmp_path, {}, Layout(tensor=8, pipeline=1, data=4, accumulation=2, micro_batch=1))
    assert made.trn_config.tensor_parallel_size == 8
    assert made.trn_config.sequence_parallel_enabled is False, "its LoRA is wrong with it"
    assert made.trn_config.use_xser is False and made.trn_config.async_save is False, "CPUs must read what it saves"
    default = type(made)(output_dir=str(tmp_path / "default"), tensor_parallel_size=8, report_to="none")
    assert default.trn_config.sequence_parallel_enabled is True, "the default that must be told off"


def test_options_arrive_where_they_belong(tmp_path, sizes):
    sizes.tensor, sizes.pipeline = 2, 2
    options = {"steps": 70, "learning_rate": 1e-4, "weight_decay": 0.1, "beta2": 0.9, "clip_norm": 0.5, "seed": 3,
               "checkpoint_every": 30, "log_every": 5,
               "neuron": {"zero_1": False, "fuse_qkv": True, "gradient_checkpointing": True}}  # fmt: skip
    made = built(tmp_path, options, Layout(tensor=2, pipeline=2, data=1, accumulation=4, micro_batch=2))
    assert (made.max_steps, made.learning_rate, made.weight_decay, made.adam_beta2) == (70, 1e-4, 0.1, 0.9)
    assert (made.max_grad_norm, made.seed, made.save_steps, made.logging_steps) == (0.5, 3, 30, 5)
    assert made.bf16 and not made.zero_1 and made.skip_cache_push and made.save_only_model and not made.do_eval
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (8, 1), "a pipeline's own way"
    assert made.pipeline_parallel_num_microbatches == made.trn_config.pipeline_parallel_num_microbatches == 8
    assert made.trn_config.fuse_qkv and made.trn_config.gradient_checkpointing
    assert made.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert made.max_length == 128 and not made.packing and made.dataset_kwargs == {"skip_prepare_dataset": True}


def test_a_trial_saves_nothing_and_is_short(tmp_path):
    made = built(tmp_path, {"steps": 500}, Layout(1, 1, 1, 1, 1), trial=True)
    assert made.max_steps == 10 and made.save_strategy == "no"


def test_resuming_is_refused_by_the_trainer_itself():
    from optimum.neuron import NeuronTrainer

    assert "`resume_from_checkpoint` is not supported" in inspect.getsource(NeuronTrainer._train)


def test_peft_takes_our_settings():
    from peft import LoraConfig

    made = LoraConfig(**lora_arguments(config(rslora=True, dropout=0.1, rank=4), ["q_proj", "down_proj"]))
    assert made.r == 4 and made.use_rslora and made.target_modules == {"q_proj", "down_proj"} and not made.use_dora
    assert made.init_lora_weights is True


def calls(function: str) -> dict[str, set[str]]:
    """Callee to the keywords that a function of our backend passes."""
    tree = ast.parse(inspect.getsource(backend))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    made: dict[str, set[str]] = {}
    for node in ast.walk(found):
        if isinstance(node, ast.Call):
            made.setdefault(ast.unparse(node.func), set()).update(word.arg for word in node.keywords if word.arg)
    return made


def test_the_trainer_takes_every_keyword_and_calls_what_we_override():
    from optimum.neuron import NeuronSFTTrainer, NeuronTrainer

    passed = calls("train")["_trainer_class()"] - {"options"}
    assert {"model", "args", "train_dataset", "peft_config", "data_collator"} <= passed
    assert passed <= set(inspect.signature(NeuronSFTTrainer.__init__).parameters)
    made = backend._trainer_class()
    for name in ("_get_train_sampler", "create_scheduler"):
        ours, theirs = inspect.signature(getattr(made, name)), inspect.signature(getattr(NeuronTrainer, name))
        assert list(ours.parameters) == list(theirs.parameters), name
    assert "sampler_fn=self._get_train_sampler" in inspect.getsource(NeuronTrainer.get_train_dataloader)
    assert "self.create_scheduler(" in inspect.getsource(NeuronTrainer.create_optimizer_and_scheduler)
    assert "self.callback_handler.on_save" in inspect.getsource(NeuronTrainer.maybe_save_checkpoint)


def test_the_model_takes_every_keyword():
    from optimum.neuron.models.training.modeling_utils import NeuronModelMixin

    source = inspect.getsource(NeuronModelMixin.from_pretrained)
    named = set(inspect.signature(NeuronModelMixin.from_pretrained).parameters)
    for name in model_arguments(config()):
        assert name in named or f'"{name}"' in source or name == "attn_implementation", name
    assert model_arguments(config())["attn_implementation"] == "flash_attention_2"
    assert "attn_implementation" in inspect.getsource(NeuronModelMixin), "the mixin reads it"
    assert model_arguments(config(neuron={"flash_attention": False}))["attn_implementation"] == "eager"


def test_its_sampler_keeps_our_order_over_any_number_of_ranks():
    """Each rank takes every n-th sample, so that together they take a step's samples in the plan's order."""
    from optimum.neuron.accelerate.accelerator import NeuronAccelerator
    from torch.utils.data import DataLoader, SequentialSampler

    data = list(range(16))
    steps: list[list[int]] = [[] for _ in range(4)]
    for rank in range(2):
        loader = DataLoader(data, batch_size=2, sampler=SequentialSampler(data), collate_fn=list)  # type: ignore[arg-type]
        dealt = NeuronAccelerator._prepare_data_loader_for_distributed(None, loader, 2, rank, False)
        for number, batch in enumerate(dealt):
            steps[number].extend(batch)
    assert [sorted(step) for step in steps] == [data[4 * n : 4 * n + 4] for n in range(4)]


def test_the_learning_rate_is_that_of_every_other_backend():
    options = config(steps=20, warmup_steps=4, learning_rate=1e-3)
    trainer = backend._trainer_class().__new__(backend._trainer_class())
    trainer.options = options
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=options.learning_rate)
    scheduler = trainer.create_scheduler(20, optimizer)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate(step, options))
        optimizer.step()
        scheduler.step()


def test_transformers_4_reads_a_config_of_transformers_5_only_in_the_older_words(tmp_path):
    from transformers import AutoConfig

    newer = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_parameters": ROPE,
             "max_position_embeddings": 131072, "dtype": "bfloat16"}  # fmt: skip
    read = {}
    for name, settings in (("newer", newer), ("ours", compatible_settings(newer))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
        read[name] = AutoConfig.from_pretrained(tmp_path / name)
    assert read["newer"].rope_theta == 10000.0 and read["newer"].rope_scaling is None, "what it does by itself"
    assert read["ours"].rope_theta == 500000.0 and read["ours"].rope_scaling["rope_type"] == "llama3"
    assert read["ours"].rope_scaling["factor"] == 32.0 and read["ours"].dtype == torch.bfloat16


def test_a_rank_refuses_a_model_that_trains_more_than_factors():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="trains 2 parameters beside the factors"):
        backend._only_factors(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="trains no parameter at all"):
        backend._only_factors(model)
