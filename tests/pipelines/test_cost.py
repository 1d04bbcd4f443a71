"""The cost of a run in its summary: the sum of the steps' that have one, or why there is none."""

from crosstrain.pipelines.progress import Progress
from crosstrain.pipelines.spec import load
from crosstrain.pipelines.summary import cost


def progress(**usd: float) -> Progress:
    made = Progress(load("pretrain_finetune").tasks({}))
    for step in made.ordered():
        if step.component in usd:
            step.metrics = {"cost_usd": usd[step.component]}
    return made


def test_steps_add_up_and_are_told_apart():
    found = cost(progress(train_fp8=100.25, finetune_lora=10.5))
    assert found["usd"] == 110.75
    assert found["basis"].startswith("USD: Pre-train 100.25, Fine-tune with LoRA 10.50; steps without a price")


def test_on_a_laptop_there_is_none_and_it_says_why():
    found = cost(progress())
    assert found["usd"] is None and "no step ran as a job on an instance type that has a price" in found["basis"]
