"""The whole step: the same output whoever does the work and however often it is killed, and one clear error else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.step import RECORD_NAME, load_config
from crosstrain.components.core.storage import open_store
from crosstrain.components.core.tokenizer import load_tokenizer
from crosstrain.components.core.workers import count_workers
from crosstrain.components.tokenize import program

Take = Callable[..., str]
Tokenize = Callable[..., Artifact]
Texts = Callable[[Artifact], list[str]]

TEXT = "The quick brown fox jumps over the lazy dog; été 日本, {number} times and {number} more.\n"


def jsonl(documents: int, words: int = 4) -> str:
    texts = [TEXT.format(number=number) * (1 + number % words) for number in range(documents)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def contents(artifact: Artifact) -> dict[str, bytes]:
    """Every object of an output, but the record of the run."""
    return {e.key: artifact.store.read(e.key) for e in artifact.store.list() if e.key != RECORD_NAME}


def test_the_output_does_not_depend_on_workers_or_place(take: Take, tokenize: Tokenize, s3_uri: str) -> None:
    corpus = take({"a.jsonl": jsonl(60), "b.jsonl": jsonl(31)})
    options = {"unit_bytes": 4096, "deduplicate": True, "tokenizer_uri": "", "vocab_size": 300}
    alone = tokenize(corpus, **options)
    assert len(alone.facts.parts) > 2
    assert contents(tokenize(corpus, workers=3, **options)) == contents(alone)
    assert contents(tokenize(corpus, output=f"{s3_uri}/tokens", **options)) == contents(alone)


def test_the_order_in_which_units_end_does_not_matter(
    take: Take, tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = take({"a.jsonl": jsonl(60)})
    expected = tokenize(corpus, unit_bytes=4096)
    assert len(expected.facts.parts) > 2
    real = program.do_units
    monkeypatch.setattr(program, "do_units", lambda *given: reversed(list(real(*given))))
    assert contents(tokenize(corpus, unit_bytes=4096)) == contents(expected)


def test_a_corpus_and_a_tokenizer_are_read_from_object_storage(
    take: Take, tokenize: Tokenize, texts_of: Texts, s3_uri: str, plain_tokenizer: Path
) -> None:
    store = open_store(s3_uri)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        store.upload(plain_tokenizer / name, f"my tokenizer/{name}")
    store.write("data/a b+c.jsonl", jsonl(20).encode())
    store.write("data/ü.jsonl", jsonl(7).encode())
    corpus = take({}, source=f"{s3_uri}/data")
    artifact = tokenize(corpus, tokenizer_uri=f"{s3_uri}/my tokenizer/", unit_bytes=1024, output=f"{s3_uri}/out")
    local = tokenize(take({"a b+c.jsonl": jsonl(20), "ü.jsonl": jsonl(7)}), unit_bytes=1024)
    assert texts_of(artifact) == texts_of(local)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_and_run_again_gives_the_same_bytes(
    take: Take, tokenize: Tokenize, tmp_path: Path, plain_tokenizer: Path, workers: int
) -> None:
    corpus = take({"a.jsonl": jsonl(6000)})
    options: dict[str, Any] = {"engine": "tokenizers", "unit_bytes": 100_000}
    output = tmp_path / "killed"
    command = [
        sys.executable, "-m", "crosstrain.components.tokenize", "--corpus", corpus, "--output", str(output),
        "--tokenizer-uri", str(plain_tokenizer), "--engine", "tokenizers", "--unit-bytes", "100000",
        "--workers", str(workers),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 60
        while not list(output.glob("units/*.json")):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < limit
            time.sleep(0.01)
        helpers = children_of(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = {path.stem: (output / f"{path.stem}.bin").stat().st_mtime_ns for path in output.glob("units/*.json")}
    assert not (output / "manifest.json").exists()
    limit = time.monotonic() + 20
    while any(map(alive, helpers)):
        assert time.monotonic() < limit, "workers outlived their parent"
        time.sleep(0.05)
    again = tokenize(corpus, output=str(output), **options)
    assert 0 < len(finished) < len(again.facts.parts)
    for stem, when in finished.items():
        assert (output / f"{stem}.bin").stat().st_mtime_ns == when, "a finished unit was done again"
    for leftover in output.glob(".crosstrain-*"):
        assert leftover.is_dir(), leftover
    assert {key: data for key, data in contents(again).items() if not key.startswith(".crosstrain")} == contents(
        tokenize(corpus, **options)
    )


def test_what_other_work_left_is_not_taken_over(take: Take, tokenize: Tokenize, tmp_path: Path) -> None:
    corpus, output = take({"a.jsonl": jsonl(40)}), str(tmp_path / "out")
    first = tokenize(corpus, output=output, unit_bytes=1024, append_eos=False)
    record = {
        "key": "another", "unit": "part-00000", "note": {},
        "files": [file.model_dump(mode="json") for file in first.manifest.files if "part" in file.path],
    }  # fmt: skip
    first.store.write("units/part-00000.json", json.dumps(record).encode())
    first.store.delete("manifest.json")
    assert contents(tokenize(corpus, output=output)) == contents(tokenize(corpus))


def test_the_same_work_is_not_done_twice_and_other_work_is_refused(
    take: Take, tokenize: Tokenize, tmp_path: Path
) -> None:
    corpus, output = take({"a.jsonl": jsonl(5)}), str(tmp_path / "out")
    first = tokenize(corpus, output=output)
    assert tokenize(corpus, output=output, workers=2).manifest.sha256 == first.manifest.sha256
    with pytest.raises(ValueError, match="already holds the tokens of another run"):
        tokenize(corpus, output=output, append_eos=False)


def test_a_trained_tokenizer_loads_in_transformers_and_gives_the_same_ids(
    take: Take, tokenize: Tokenize, texts_of: Texts
) -> None:
    artifact = tokenize(take({"a.jsonl": jsonl(50)}), vocab_size=400)
    facts = artifact.facts
    folder = artifact.fetch_all() / "tokenizer"
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (facts.tokenizer.bos_id, facts.tokenizer.eos_id) == (None, 0)
    assert (theirs.eos_token, theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token) == (
        "<|endoftext|>",
        0,
        1,
        None,
    )
    assert len(theirs) == facts.tokenizer.vocab_size <= 400
    texts = ["a  b\n\n c , d .", "It's 日本 \U0001f600\r\n", " leading", "def f(x):\n\treturn x"]
    assert [theirs.encode(text) for text in texts] == [ids.tolist() for ids in ours.encode_batch(texts)]
    assert [theirs.decode(theirs.encode(text)) for text in texts] == texts
    assert texts_of(artifact)[3] == TEXT.format(number=3) * 4


def test_training_gives_the_same_tokenizer_every_time(take: Take, tokenize: Tokenize) -> None:
    corpus = take({"a.jsonl": jsonl(80), "b.jsonl": jsonl(80, words=2)})
    runs = [tokenize(corpus, vocab_size=600, unit_bytes=size) for size in (1 << 27, 1 << 27, 2048)]
    assert len({run.facts.tokenizer.sha256 for run in runs}) == 1


def test_training_looks_at_all_of_the_corpus_within_its_budget(take: Take, tokenize: Tokenize) -> None:
    files = {"a.jsonl": json.dumps({"text": "abab " * 2000}), "b.jsonl": json.dumps({"text": "xyxy " * 2000})}
    artifact = tokenize(take(files), vocab_size=262, unit_bytes=1024, training_bytes=2000)
    merges = json.loads(artifact.read("tokenizer/tokenizer.json"))["model"]["merges"]
    assert {"a b", "x y"} <= {" ".join(pair) for pair in merges}


def test_a_tokenizer_is_taken_from_tokens_and_shards(take: Take, tokenize: Tokenize, tmp_path: Path) -> None:
    first = tokenize(take({"a.jsonl": jsonl(50)}), vocab_size=300)
    second = tokenize(take({"b.jsonl": jsonl(5)}), tokenizer=first.uri, vocab_size=999)
    assert second.facts.tokenizer == first.facts.tokenizer
    assert second.manifest.inputs["tokenizer"].sha256 == first.manifest.sha256
    assert second.read("tokenizer/tokenizer_config.json") == first.read("tokenizer/tokenizer_config.json")


def test_a_tokenizer_is_taken_from_a_model(
    take: Take, tokenize: Tokenize, tokenizer_folder: Path, tmp_path: Path
) -> None:
    from crosstrain.components.core.manifest import ModelFacts

    facts = ModelFacts(
        architecture="LlamaForCausalLM", parameters=1, dtype="float32", vocab_size=384, max_sequence_length=8,
        tied_embeddings=False, tokenizer_sha256=None, precision="imported",
    )  # fmt: skip
    with ArtifactWriter(str(tmp_path / "model")) as out:
        out.add_folder(tokenizer_folder)
        out.commit("import_model", facts, {}, {})
    corpus = take({"a.jsonl": jsonl(5)})
    artifact = tokenize(corpus, tokenizer=str(tmp_path / "model"))
    assert artifact.facts.tokenizer.bos_id == 0
    with pytest.raises(ValueError, match="a corpus artifact has no tokenizer"):
        tokenize(corpus, tokenizer=corpus)


def test_a_bare_tokenizer_file_needs_its_eos_named(
    take: Take, tokenize: Tokenize, plain_tokenizer: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "some.json"
    bare.write_bytes((plain_tokenizer / "tokenizer.json").read_bytes())
    corpus = take({"a.jsonl": jsonl(5)})
    with pytest.raises(ValueError, match=r"names no eos_token; set eos_token to one of .*<\|end\|>"):
        tokenize(corpus, tokenizer_uri=str(bare))
    artifact = tokenize(corpus, tokenizer_uri=str(bare), eos_token="<|end|>")
    assert AutoTokenizer.from_pretrained(artifact.fetch_all() / "tokenizer").eos_token_id == 1


def test_the_encoder_is_recorded(take: Take, tokenize: Tokenize, make_tokenizer: Callable[..., Path]) -> None:
    corpus = take({"a.jsonl": jsonl(5)})
    fast, slow = tokenize(corpus), tokenize(corpus, engine="tokenizers")
    assert fast.facts.engine.startswith("fastokens 0.")
    assert slow.facts.engine.startswith("tokenizers 0.")
    assert fast.manifest.file("part-00000.bin") == slow.manifest.file("part-00000.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\n", "nothing to tokenize: 0 read"),
        ('{"text": ""}\n{"text": " "}\n', "nothing to tokenize: 2 read, 2 empty"),
        ('{"body": "x", "id": 1}\n', "no text in field 'text': set text_field to one of body, id"),
    ],
)
def test_a_corpus_without_text_is_an_error(take: Take, tokenize: Tokenize, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize(take({"a.jsonl": content}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "vocab_size: give a tokenizer or tokenizer_uri, or a vocab_size of at least 258"),
        ({"vocab_size": 257}, "vocab_size of at least 258 to train one .given 257"),
        ({"vocab_size": 300, "separator": "x"}, "separator: belongs to split_text=separator"),
        ({"vocab_size": 300, "split_text": "separator"}, "separator: belongs to split_text=separator"),
        ({"vocab_size": 300, "text_feild": "x"}, "did you mean 'text_field'"),
        ({"vocab_size": 300, "on_invalid": "ignore"}, "on_invalid"),
        ({"vocab_size": 300, "eos_token": "</s>"}, r"eos_token: the BPE .* ends documents with <\|endoftext\|>"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("tokenize").decode({"corpus": "c", "output": "o", **options})


def test_what_is_not_there_is_named(take: Take, tokenize: Tokenize, tmp_path: Path) -> None:
    corpus = take({"a.jsonl": jsonl(3)})
    with pytest.raises(FileNotFoundError, match="no manifest"):
        tokenize(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        tokenize(corpus, tokenizer_uri=str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match=r"nothing\.json"):
        tokenize(corpus, tokenizer_uri=str(tmp_path / "nothing.json"))


def test_an_output_that_cannot_be_written_is_an_error_before_the_work(
    take: Take, tokenize: Tokenize, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="cannot write the output here"):
        tokenize(take({"a.jsonl": jsonl(3)}), output=str(tmp_path / "file" / "out"))


def test_workers_are_bounded_by_units() -> None:
    assert count_workers(8, 3) == 3
    assert count_workers(1, 3) == 1
    assert 1 <= count_workers(0, 1000) <= (os.cpu_count() or 1)
    assert count_workers(0, 0) == 1


def test_the_command_line_ends_in_one_line_for_a_bad_input(take: Take, tmp_path: Path, plain_tokenizer: Path) -> None:
    corpus = take({"a.jsonl": jsonl(3) + "broken\n"})
    done = subprocess.run(
        [sys.executable, "-m", "crosstrain.components.tokenize", "--corpus", corpus, "--output", str(tmp_path / "o"),
         "--tokenizer-uri", str(plain_tokenizer)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: a.jsonl: line 4: broken JSON")
    assert done.stderr.count("\n") == 1
