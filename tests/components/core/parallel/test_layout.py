"""Layouts are worked out, or refused with the reason and the nearest one; without torch."""

import subprocess
import sys

import pytest

from crosstrain.components.core.parallel.layout import Layout, Work, check_layout
from crosstrain.components.core.parallel.options import DataParallelOptions, ModelParallelOptions
from crosstrain.components.core.presets import PRESETS

LLAMA = {**PRESETS["8b"], "vocab_size": 128_256}
SMALL = {**PRESETS["debug"], "vocab_size": 96}  # two blocks, two key-value heads


def layout(shape, world, global_batch=64, micro_batch=1, **options):
    work = Work(
        global_batch,
        micro_batch,
        schedule=options.get("pipeline_schedule", "1f1b"),
        alignment=options.pop("alignment", 1),
        minimum_features=32,
    )
    split = {name: value for name, value in options.items() if name.startswith("data")}
    rest = {name: value for name, value in options.items() if not name.startswith("data")}
    return check_layout(shape, world, work, DataParallelOptions(**split), ModelParallelOptions(**rest))


@pytest.mark.parametrize(
    ("world", "options", "degrees"),
    [
        (1, {}, (1, 1, 1, 1)),
        (8, {}, (1, 8, 1, 1)),
        (8, {"data_parallel_replicate": 2}, (2, 4, 1, 1)),
        (8, {"data_parallel_replicate": 0, "data_parallel_shard": 2}, (4, 2, 1, 1)),
        (8, {"data_parallel_replicate": 0}, (1, 8, 1, 1)),
        (64, {"tensor_parallel": 8, "pipeline_parallel": 2}, (1, 4, 8, 2)),
        (4, {"tensor_parallel": 2, "pipeline_parallel": 2}, (1, 1, 2, 2)),
    ],
)
def test_what_is_left_open_is_filled_in(world, options, degrees):
    found = layout(LLAMA, world, **options)
    assert (found.replicate, found.shard, found.tensor, found.pipeline) == degrees
    assert found.world == world


@pytest.mark.parametrize(
    ("world", "micro", "batches"), [(1, (8, 8), (8, 1)), (2, (8, 8), (4, 1)), (4, (8, 2), (2, 1)), (2, (8, 2), (2, 2))]
)
def test_a_micro_batch_is_cut_down_to_what_a_rank_has(world, micro, batches):
    found = layout(LLAMA, world, *micro)
    assert (found.micro_batch, found.micro_batches) == batches


REFUSED = [
    (SMALL, 4, {"tensor_parallel": 4}, "tensor_parallel 4 is above the model's 2 key-value heads", (1, 2, 2, 1)),
    (LLAMA, 6, {"tensor_parallel": 6, "global_batch": 60}, "does not divide num_key_value_heads 8", (1, 3, 2, 1)),
    ({**LLAMA, "vocab_size": 50_257}, 8, {"tensor_parallel": 8}, "does not divide vocab_size 50257", (1, 8, 1, 1)),
    (
        {**LLAMA, "intermediate_size": 14_338}, 4, {"tensor_parallel": 4},
        "does not divide intermediate_size 14338", (1, 2, 2, 1),
    ),
    (
        {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 8}, 8, {"tensor_parallel": 8},
        "does not divide num_attention_heads 12", (1, 2, 4, 1),
    ),
    (SMALL, 4, {"pipeline_parallel": 4}, "pipeline_parallel 4 is above the model's 2 blocks", (1, 2, 1, 2)),
    (LLAMA, 4, {"global_batch": 6}, "global_batch_size 6 does not divide over 4 data-parallel ranks", (1, 2, 2, 1)),
    (
        LLAMA, 2, {"global_batch": 12, "micro_batch": 4},
        r"6 sequences \(global_batch_size 12 over 2\) are no multiple of micro_batch_size 4", (1, 1, 2, 1),
    ),
    (
        LLAMA, 4, {"pipeline_parallel": 4, "global_batch": 2}, "1f1b wants as many micro-batches as stages",
        (1, 1, 2, 2),
    ),
    (LLAMA, 6, {"data_parallel_shard": 4, "global_batch": 60}, "makes 4 processes, and there are 6", (1, 6, 1, 1)),
    (
        {**LLAMA, "head_dim": 24}, 8, {"tensor_parallel": 8, "alignment": 16},
        "multiples of 16, and tensor_parallel 8 leaves a rank 24", (1, 2, 4, 1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "world", "options", "words", "near"), REFUSED)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(shape, world, options, words, near):
    wanted = Layout(*near)
    with pytest.raises(ValueError, match=f"{words}.*nearest layout that is possible: {wanted}$"):
        layout(shape, world, **options)
    again = {name: degree for name, degree in wanted.degrees().items()}
    kept = {name: value for name, value in options.items() if name in ("global_batch", "micro_batch", "alignment")}
    assert str(layout(shape, world, **kept, **again)) == str(wanted)


def test_too_many_processes_are_told_how_many_would_do():
    with pytest.raises(ValueError, match=r"possible on 4 processes: .*shard 2, tensor_parallel 2, pipeline"):
        layout(SMALL, 5, global_batch=2)


def test_gpipe_takes_fewer_micro_batches_than_stages():
    assert layout(LLAMA, 4, global_batch=2, pipeline_parallel=4, pipeline_schedule="gpipe").micro_batches == 2


def test_none_of_it_needs_torch():
    code = "import sys, crosstrain.components.core.parallel.layout; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_model_of_unknown_shape_is_dealt_to_data_parallel_ranks_alone():
    with pytest.raises(ValueError, match=r"12 does not divide over 8 .*on 6 processes: .*tensor_parallel 1, pipeline"):
        check_layout({}, 8, Work(12, 1), DataParallelOptions())
