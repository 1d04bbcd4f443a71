"""One GPU, under five minutes: does every fp8 recipe compute, train, pay off, and come back out of a checkpoint?

    python -m bench.gpu_check [--seconds 280] [--preset 350m] [--steps 60] [--arms bf16,current,delayed]

Prints JSON lines: the device and which recipes it has; each linear's forward and backward against fp32, beside
BF16's error; loss curves of one small Llama in BF16 and every recipe over the same data, with tokens a second, MFU
and memory; save, load and equal logits; last a verdict. Exit status 0: all held; 1: something did not; 2: there is no
GPU, said in one line. It has not been run on a GPU by us: what a CPU can run of it is tested, and nothing it prints
there is a speed.

MFU is core/flops': what the model needs over the device's dense BF16 peak, for fp8 too, so the rows compare as times
do.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosstrain.components.core.batch import loss_sum
from crosstrain.components.core.flops import Flops, device_peak
from crosstrain.components.core.precision import Precision, choose
from crosstrain.components.core.precision.base import BACKENDS
from crosstrain.components.core.precision.fp8 import Fp8
from crosstrain.components.core.presets import PRESETS

ARMS = ("bf16", *BACKENDS)
LAYER_LIMIT = 0.08
"""Largest relative error (Frobenius) of an fp8 product that passes: two E4M3 operands come to about 0.04."""
LOSS_LIMIT = 0.05
"""Largest distance of an fp8 arm's last losses from BF16's, relative, that passes."""
WARM_UP = 5
"""Steps left out of speeds."""
VOCABULARY = 4096

Line = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run every check that fits in the time and print its lines; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=280, help="time for everything; what does not fit is left out")
    parser.add_argument("--preset", default="350m", choices=sorted(PRESETS), help="shape of the Llama that is trained")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated, of: " + ", ".join(ARMS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print_line({"check": "device", "error": "torch sees no CUDA device here; nothing was checked"})
        return 2
    device = torch.device("cuda")
    deadline = time.monotonic() + options.seconds
    failed = list(run(device, options, lambda: deadline - time.monotonic()))
    print_line({"check": "verdict", "passed": not failed, "failed": failed})
    return 1 if failed else 0


def run(device: torch.device, options: argparse.Namespace, left: Callable[[], float]) -> Iterator[str]:
    """Print a line for every check; names of those that failed."""
    print_line(describe(device))
    config = LlamaConfig(**{**PRESETS[options.preset], "vocab_size": VOCABULARY, "tie_word_embeddings": False})
    precisions: dict[str, Precision] = {}
    for arm in options.arms.split(","):
        try:
            precisions[arm] = make_precision(arm, device, config)
        except ValueError as error:
            print_line({"check": "recipe", "arm": arm, "refused": str(error)})
    losses: dict[str, float] = {}
    for arm, precision in precisions.items():
        for check, work in (
            ("layers", lambda chosen=precision: check_layers(chosen, config, device)),
            ("training", lambda chosen=precision: check_training(chosen, config, device, options)),
            ("checkpoint", lambda chosen=precision: check_checkpoint(chosen, config, device)),
        ):
            line: Line = {"check": check, "arm": arm, "precision": precision.name}
            if left() <= 0:
                print_line({**line, "left_out": "no time left"})
                continue
            started = time.monotonic()
            line |= work()
            if check == "training":
                losses[arm] = line["last_loss"]
                line |= compare(losses, arm)
            print_line({**line, "seconds": round(time.monotonic() - started, 1)})
            if not line["passed"]:
                yield f"{arm}: {check}"


def make_precision(arm: str, device: torch.device, config: LlamaConfig) -> Precision:
    """The precision of an arm.

    Raises:
        ValueError: the device or the model cannot do it.
    """
    precision = choose("bf16", device) if arm == "bf16" else choose("fp8", device, recipe=arm)  # type: ignore[arg-type]
    precision.check(config)
    return precision


def describe(device: torch.device) -> Line:
    """What this runs on."""
    line: Line = {"check": "device", "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("transformer-engine", "torchao", "transformers"):
        try:
            line[package] = version(package)
        except PackageNotFoundError:
            line[package] = None
    if device.type == "cuda":
        line |= {"name": torch.cuda.get_device_name(device), "capability": torch.cuda.get_device_capability(device)}
    return line


def make_model(config: LlamaConfig, device: torch.device, blocks: int | None = None) -> LlamaForCausalLM:
    """A Llama with weights that are a function of its configuration."""
    torch.manual_seed(0)
    chosen = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": blocks or config.num_hidden_layers})
    return LlamaForCausalLM(chosen).float().to(device)  # type: ignore[arg-type]


def check_layers(precision: Precision, config: LlamaConfig, device: torch.device, tokens: int = 512) -> Line:
    """Each linear of a block alone: output and gradients against fp32's, over inputs with outliers."""
    model = make_model(config, device, blocks=1)
    precision.convert(model)
    converted = precision.converted_linears(model) if isinstance(precision, Fp8) else {}
    errors: dict[str, list[float]] = {}
    for name, linear in model.model.layers[0].named_modules():
        if not hasattr(linear, "in_features"):
            continue
        generator = torch.Generator(device).manual_seed(1)
        draw = lambda width: torch.randn(tokens, width, device=device, generator=generator)  # noqa: E731, B023
        x = draw(linear.in_features) * torch.exp(draw(linear.in_features))
        gradient = draw(linear.out_features) * 1e-4
        weight = linear.weight.detach()
        wanted = (x @ weight.t(), gradient @ weight, gradient.t() @ x)
        for _ in range(3):  # delayed scales have settled by the third
            x.grad = linear.weight.grad = None
            with precision.autocast():
                output = linear(x.requires_grad_())
            output.backward(gradient.to(output.dtype))
        found = (output.detach(), x.grad, linear.weight.grad)
        errors[name] = [relative(part, whole) for part, whole in zip(found, wanted, strict=True)]
        x.requires_grad_(False)
    precision.restore(model)
    worst = max(max(values) for values in errors.values())
    return {
        "relative_error": {name: [round(value, 5) for value in values] for name, values in errors.items()},
        "of": ["output", "input gradient", "weight gradient"],
        "fp8_layers": len(converted),
        "passed": worst < LAYER_LIMIT,
    }


def relative(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted."""
    assert found is not None
    return float((found.float() - wanted).norm() / wanted.norm())


def batches(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless ids [B, L] of a random second-order walk, with what loss_sum wants beside them; the same in each arm."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    positions = torch.arange(options.length).expand(options.batch, -1)
    while True:
        choices = torch.randint(4, (options.batch, options.length), generator=generator)
        ids = torch.empty(options.batch, options.length, dtype=torch.int64)
        ids[:, 0] = choices[:, 0]
        for index in range(1, options.length):
            ids[:, index] = table[ids[:, index - 1], choices[:, index]]
        targets = torch.cat([ids[:, 1:], torch.full((options.batch, 1), -100)], 1)
        yield tuple(item.to(device) for item in (ids, positions, targets))


def check_training(
    precision: Precision, config: LlamaConfig, device: torch.device, options: argparse.Namespace
) -> Line:
    """A loss curve, and on a GPU what it cost."""
    model, source = make_model(config, device), batches(options, device)
    converted = precision.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    labels, losses, seconds = options.batch * (options.length - 1), [], 0.0
    data = [next(source) for _ in range(min(options.steps, 8))]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(options.steps):
        started = tick(device)
        with precision.autocast():
            loss = loss_sum(model, *data[step % len(data)]) / labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        seconds += tick(device) - started if step >= WARM_UP else 0.0
    precision.restore(model)
    values = [float(loss) for loss in losses]
    last = sum(values[-5:]) / len(values[-5:])
    line: Line = {
        "fp8_layers": converted,
        "loss_curve": [round(value, 4) for value in values[:: max(1, options.steps // 12)]],
        "last_loss": round(last, 4),
        "passed": math.isfinite(last) and last < values[0],
    }
    return line | (cost(model, device, options, seconds) if device.type == "cuda" else {})


def tick(device: torch.device) -> float:
    """The time once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cost(model: LlamaForCausalLM, device: torch.device, options: argparse.Namespace, seconds: float) -> Line:
    """Tokens a second, MFU and memory of an arm."""
    speed = (options.steps - WARM_UP) * options.batch * options.length / seconds if seconds else 0.0
    peak = device_peak(device)
    return {
        "tokens_per_second": round(speed),
        "mfu": round(speed * Flops.of(model).per_token(options.length) / peak, 4) if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
    }


def compare(losses: dict[str, float], arm: str) -> Line:
    """An arm's last loss beside BF16's, where that has run."""
    if arm == "bf16" or "bf16" not in losses:
        return {}
    gap = losses[arm] / losses["bf16"] - 1
    return {"loss_gap_percent": round(100 * gap, 3), "passed": abs(gap) < LOSS_LIMIT}


def check_checkpoint(precision: Precision, config: LlamaConfig, device: torch.device) -> Line:
    """Saved weights give transformers equal logits; scaling state goes into another model and comes out again."""
    model = make_model(config, device, blocks=2)
    ids = torch.arange(128, device=device)[None] % VOCABULARY
    precision.convert(model)
    for _ in range(2):
        with precision.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    state, keys = precision.state(), set(model.state_dict())
    precision.restore(model)
    precision.load_state(state)
    precision.convert(model)
    again = precision.state()
    precision.restore(model)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder).to(device)
        equal = torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    held = {
        "equal_logits": equal,
        "plain_keys": not [key for key in keys if key.endswith("_extra_state")],
        "state_round_trip": state.keys() == again.keys() and all(torch.equal(state[key], again[key]) for key in state),
    }
    return {**held, "state_tensors": len(state), "passed": all(held.values())}


def print_line(line: Line) -> None:
    """One JSON object on one line, at once."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
