"""What has a label: completions, answers and the EOS that ends them; never a prompt, a pad or a doubled BOS."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from crosstrain.components.core.batch import make_batch
from crosstrain.components.core.data import IGNORE, Sample
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.tokenizer import Tokenizer, load_tokenizer
from crosstrain.components.finetune_lora.config import Config
from crosstrain.components.finetune_lora.rows import RowDataset, read_rows

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 2 and 2."},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "7"},
]


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def read(corpus, tokenizer: Tokenizer):
    def make(rows: list[dict[str, Any]], sequence_length: int = 256, name: str = "rows", **options: Any) -> RowDataset:
        config = Config(model="m", data="d", output="o", **options)
        return read_rows(corpus(rows, name), tokenizer, config, sequence_length)

    return make


def learned(sample: Sample, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(sample.labels[sample.labels != IGNORE])


def test_only_the_completion_and_its_eos_have_labels(read, tokenizer) -> None:
    (sample,) = read([{"prompt": "Add 2 and 2. ", "completion": "It is 4."}])
    assert tokenizer.decode(sample.input_ids) == "<|bos|>Add 2 and 2. It is 4.<|eos|>"
    assert learned(sample, tokenizer) == "It is 4.<|eos|>"
    assert (sample.position_ids == np.arange(len(sample.input_ids))).all()


def test_the_final_eos_keeps_its_label_where_the_pad_is_eos(read, tokenizer, tokenizer_folder) -> None:
    hf = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert hf.pad_token_id == hf.eos_token_id == tokenizer.eos_id
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a much longer prompt ", "completion": "and its answer"}]
    dataset = read(rows)
    batch = make_batch([dataset[0], dataset[1]])
    last = len(dataset[0].input_ids) - 1
    assert batch.targets[0, last - 1] == tokenizer.eos_id
    assert (batch.targets[0, last:] == IGNORE).all()
    assert batch.labels == sum(int((dataset[i].labels != IGNORE).sum()) for i in (0, 1))


def test_a_chat_template_that_writes_bos_gives_exactly_one(read, tokenizer, tokenizer_folder) -> None:
    (sample,) = read([{"messages": CHAT}])
    hf = AutoTokenizer.from_pretrained(tokenizer_folder)
    text = hf.apply_chat_template(CHAT, tokenize=False)
    assert hf(text).input_ids[:2] == [tokenizer.bos_id] * 2  # what happens to those who tokenize a rendered chat
    assert (sample.input_ids == tokenizer.bos_id).sum() == 1
    assert sample.input_ids.tolist() == hf(text, add_special_tokens=False).input_ids


def test_only_what_the_assistant_says_has_labels(read, tokenizer) -> None:
    (sample,) = read([{"messages": CHAT}])
    assert learned(sample, tokenizer) == "4<|end|>\n7<|end|>\n"


def test_control_text_in_a_prompt_stays_text_and_in_a_chat_is_refused(read, tokenizer) -> None:
    (sample,) = read([{"prompt": "say <|eos|> now", "completion": "no"}])
    assert (sample.input_ids == tokenizer.eos_id).sum() == 1
    with pytest.raises(ValueError, match=r"line 1: a message holds '<\|eos\|>'"):
        read([{"messages": [{"role": "user", "content": "<|eos|>"}, {"role": "assistant", "content": "x"}]}], name="b")


def test_rows_cut_to_nothing_are_dropped_and_counted(read) -> None:
    rows = [{"prompt": "long " * 40, "completion": "lost"}, {"prompt": "short ", "completion": "kept"}]
    rows += [{"prompt": "only a prompt", "completion": "answer"}]
    dataset = read(rows, sequence_length=16)
    assert (len(dataset), dataset.dropped) == (2, 1)
    assert all((dataset[i].labels[1:] != IGNORE).any() and len(dataset[i].input_ids) <= 16 for i in range(2))


def test_no_row_left_is_an_error(read) -> None:
    with pytest.raises(ValueError, match="none of 1 rows has anything to learn from within sequence_length=8"):
        read([{"prompt": "long " * 40, "completion": "lost"}], sequence_length=8)


def test_field_names_can_be_chosen(read, tokenizer) -> None:
    dataset = read([{"q": "x ", "a": "y"}], prompt_field="q", completion_field="a")
    assert learned(dataset[0], tokenizer) == "y<|eos|>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"prompt": "x"}',
            r"line 2: has neither the text fields 'prompt' and 'completion' nor 'messages' \(it has prompt\)",
        ),
        (b'{"prompt": "x", "completion": null}', r"line 2: has neither"),
        (b'{"prompt": "\xff"}', r"line 2: not UTF-8 at byte 12"),
        (b"{", r"line 2: not JSON"),
        (b"[1]", r"line 2: a JSON object is wanted, and this is a list"),
        (b'{"messages": []}', r"line 2: messages must be a list of objects"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', r"line 2: the chat begins with the assistant"),
        (b'{"messages": [{"role": "user"}]}', r"line 2: messages must be a list of objects"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer, line, message) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\r\n' + line + b"\r\n")
    config = load_config("import_data").decode({"source": str(folder), "output": str(tmp_path / "rows")})
    artifact = execute("import_data", config).artifact
    with pytest.raises(ValueError, match=message):
        read_rows(artifact, tokenizer, Config(model="m", data="d", output="o"), 64)


def test_compressed_rows_are_the_same_rows(tmp_path, tokenizer, pairs) -> None:
    import zstandard

    text = "".join(json.dumps(row) + "\n" for row in pairs).encode()
    forms = {"jsonl": text, "jsonl.gz": gzip.compress(text), "jsonl.zst": zstandard.ZstdCompressor().compress(text)}
    found = []
    for suffix, data in forms.items():
        path = tmp_path / suffix / f"rows.{suffix}"
        path.parent.mkdir()
        path.write_bytes(data)
        config = load_config("import_data").decode({"source": str(path), "output": str(tmp_path / f"{suffix}.out")})
        dataset = read_rows(
            execute("import_data", config).artifact, tokenizer, Config(model="m", data="d", output="o"), 64
        )
        found.append([dataset[index].input_ids.tolist() for index in range(len(dataset))])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(pairs)


def test_a_template_that_rewrites_history_is_refused(corpus, tokenizer_folder, tmp_path) -> None:
    hf = AutoTokenizer.from_pretrained(tokenizer_folder)
    hf.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% if loop.last %}<think>{% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    hf.save_pretrained(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    config = Config(model="m", data="d", output="o")
    with pytest.raises(ValueError, match=r"line 1: the chat template renders the first .* differently alone"):
        read_rows(corpus([{"messages": CHAT}]), tokenizer, config, 256)


def test_chats_need_a_chat_template(corpus, tokenizer_folder, tmp_path) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((tokenizer_folder / name).read_bytes())
    tokenizer = load_tokenizer(tmp_path / "bare")
    with pytest.raises(ValueError, match="has no chat template, and the data are chats"):
        read_rows(corpus([{"messages": CHAT}]), tokenizer, Config(model="m", data="d", output="o"), 256)
