"""Whole tokenizers, from one JSONL file to ids on disk: ours, the floors, and the tools people use.

    python -m bench.tokenizing ARM --corpus FILE --tokenizer FOLDER --out FOLDER --workers N

A floor does nothing but decode JSON, encode and write: no checksum, no index, no verification. Each peer runs as its
documentation says, with one EOS behind each document; each arm prints how many ids it made.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

BATCH = 1 << 20
"""Characters that a floor encodes at once."""


class Task(argparse.Namespace):
    """What an arm is to do."""

    corpus: Path
    tokenizer: Path
    out: Path
    workers: int


def crosstrain(task: Task) -> int:
    """Our component, from an imported corpus to a committed artifact, everything verified."""
    from crosstrain.components.core.step import execute, load_config

    values = {
        "corpus": str(task.corpus.with_suffix(".artifact")),
        "tokenizer_uri": str(task.tokenizer),
        "output": str(task.out),
    }
    result = execute("tokenize", load_config("tokenize").decode(values))
    return int(result.artifact.facts.tokens)


def floor(task: Task) -> int:
    """orjson, fastokens on all cores, a flat file of uint16."""
    import fastokens

    encoder = fastokens.Tokenizer.from_file(str(task.tokenizer / "tokenizer.json"))
    return _write_floor(task, 0, task.corpus.stat().st_size, lambda texts: _flat(encoder, texts))


def floor_processes(task: Task) -> int:
    """The same in as many processes as workers, one core each."""
    size = task.corpus.stat().st_size
    step = -(-size // task.workers)
    with Pool(task.workers, _single_thread) as pool:
        spans = [(task, begin, min(begin + step, size)) for begin in range(0, size, step)]
        return sum(pool.starmap(_floor_span, spans))


def _single_thread() -> None:
    import os

    os.environ["RAYON_NUM_THREADS"] = "1"


def _floor_span(task: Task, begin: int, end: int) -> int:
    import fastokens

    encoder = fastokens.Tokenizer.from_file(str(task.tokenizer / "tokenizer.json"))
    return _write_floor(task, begin, end, lambda texts: _flat(encoder, texts))


def floor_reference(task: Task) -> int:
    """orjson, the tokenizers library on all cores, a flat file of uint16."""
    import numpy as np
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(task.tokenizer / "tokenizer.json"))
    return _write_floor(
        task,
        0,
        task.corpus.stat().st_size,
        lambda texts: np.concatenate([np.array(e.ids, np.uint32) for e in encoder.encode_batch_fast(texts)]),
    )


def _flat(encoder: Any, texts: list[str]) -> Any:
    import numpy as np

    return np.frombuffer(encoder.encode_batch_flat(texts)[0], np.uint32)


def _write_floor(task: Task, begin: int, end: int, encode: Callable[[list[str]], Any]) -> int:
    """Ids of the lines that begin in [begin, end), plus one a document for the EOS it would have."""
    import numpy as np
    import orjson

    tokens = 0
    with task.corpus.open("rb") as source, (task.out / f"{begin}.bin").open("wb") as target:
        source.seek(max(begin - 1, 0))
        position = begin and begin - 1 + len(source.readline())
        texts: list[str] = []
        characters = 0
        for line in source:
            if position >= end:
                break
            position += len(line)
            texts.append(orjson.loads(line)["text"])
            characters += len(texts[-1])
            if characters >= BATCH:
                ids = encode(texts)
                target.write(ids.astype(np.uint16).tobytes())
                tokens += ids.size + len(texts)
                texts, characters = [], 0
        if texts:
            ids = encode(texts)
            target.write(ids.astype(np.uint16).tobytes())
            tokens += ids.size + len(texts)
    return tokens


def datasets_map(task: Task) -> int:
    """Hugging Face datasets: load JSON, map the tokenizer in batches over processes, save to disk."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = _hugging_face(task)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in found]}

    source = datasets.load_dataset(
        "json", data_files=str(task.corpus), split="train", cache_dir=str(task.out / "cache")
    )
    made = source.map(encode, batched=True, num_proc=task.workers, remove_columns=source.column_names)
    made.save_to_disk(str(task.out / "set"))
    return sum(len(ids) for ids in made.data["input_ids"])


def datatrove(task: Task) -> int:
    """datatrove: JsonlReader to DocumentTokenizer, one task a worker; the input cut into as many files."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    folder = task.out / "input"
    folder.mkdir()
    lines = task.corpus.read_bytes().splitlines(keepends=True)
    for number in range(task.workers):
        (folder / f"{number}.jsonl").write_bytes(b"".join(lines[number :: task.workers]))
    del lines
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(folder)),
            DocumentTokenizer(
                str(task.out / "made"),
                tokenizer_name_or_path=str(task.tokenizer / "tokenizer.json"),
                eos_token=_eos(task),
                shuffle_documents=False,
            ),
        ],
        tasks=task.workers,
        workers=task.workers,
        logging_dir=str(task.out / "logs"),
    ).run()
    return sum(file.stat().st_size for file in (task.out / "made").glob("*.ds")) // 2


_tokenizer: Any = None


def _encode_litdata(span: tuple[str, str, int, int]) -> Iterator[Any]:
    import numpy as np
    import torch

    global _tokenizer
    corpus, folder, begin, end = span
    if _tokenizer is None:
        _tokenizer = _hugging_face(argparse.Namespace(tokenizer=Path(folder)))
    for text in _texts(Path(corpus), begin, end):
        ids = [*_tokenizer(text, add_special_tokens=False)["input_ids"], _tokenizer.eos_token_id]
        yield torch.from_numpy(np.array(ids, np.uint16).astype(np.int32))


def litdata(task: Task) -> int:
    """litdata: optimize over byte spans, with its loader of tokens."""
    from litdata import StreamingDataset, TokensLoader, optimize

    size = task.corpus.stat().st_size
    step = -(-size // (8 * task.workers))
    spans = [(str(task.corpus), str(task.tokenizer), begin, min(begin + step, size)) for begin in range(0, size, step)]
    optimize(
        fn=_encode_litdata,
        inputs=spans,
        output_dir=str(task.out / "made"),
        chunk_size=2049 * 4096,
        item_loader=TokensLoader(),
        num_workers=task.workers,
    )
    index = json.loads((task.out / "made" / "index.json").read_text())
    assert StreamingDataset is not None
    return sum(chunk["dim"] for chunk in index["chunks"])


def _start_megatron(folder: str) -> None:
    global _tokenizer
    _tokenizer = _hugging_face(argparse.Namespace(tokenizer=Path(folder)))


def _encode_megatron(line: str) -> list[int]:
    return [*_tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], _tokenizer.eos_token_id]


def megatron(task: Task) -> int:
    """The loop of Megatron-LM's preprocess_data: a pool that encodes line by line, one builder that writes."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(task.out / "made.bin"), dtype=np.uint16)
    tokens = 0
    with (
        task.corpus.open(encoding="utf-8") as lines,
        Pool(task.workers, _start_megatron, (str(task.tokenizer),)) as pool,
    ):
        for ids in pool.imap(_encode_megatron, lines, 32):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
    builder.finalize(str(task.out / "made.idx"))
    return tokens


def _texts(corpus: Path, begin: int, end: int) -> Iterator[str]:
    with corpus.open("rb") as source:
        source.seek(max(begin - 1, 0))
        position = begin and begin - 1 + len(source.readline())
        for line in source:
            if position >= end:
                return
            position += len(line)
            yield json.loads(line)["text"]


def _hugging_face(task: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(task.tokenizer))


def _eos(task: Task) -> str:
    return str(json.loads((task.tokenizer / "tokenizer_config.json").read_text())["eos_token"])


OURS = ("crosstrain",)
FLOORS = ("floor", "floor_processes", "floor_reference")
PEERS = ("datasets_map", "datatrove", "litdata", "megatron")
ARMS: dict[str, Callable[[Task], int]] = {
    function.__name__: function
    for function in (crosstrain, floor, floor_processes, floor_reference, datasets_map, datatrove, litdata, megatron)
}


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser(prog="python -m bench.tokenizing", description=__doc__.split("\n")[0])
    parser.add_argument("arm", choices=ARMS)
    for name in ("corpus", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    task = parser.parse_args(namespace=Task())
    task.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"tokens": ARMS[task.arm](task)}))


if __name__ == "__main__":
    main()
