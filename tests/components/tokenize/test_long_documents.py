"""Documents too large for memory: the same ids, hashes, counts and refusals as in memory, whatever their size."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstrain.components.tokenize import reading, spooling

LIMIT = 512 << 20
TEXTS = st.text(st.sampled_from('a b\n\r\t"\\/é日\U0001f600\ufeff\u2028{}:,'), min_size=0, max_size=400)


@pytest.fixture
def small(monkeypatch):
    """Call a line long, a string long and a window full at a few bytes, so that every border is met."""

    def set_sizes(long: int, window: int, short: int) -> None:
        monkeypatch.setattr(reading, "LONG", long)
        monkeypatch.setattr(spooling, "_WINDOW", window)
        monkeypatch.setattr(spooling, "_SHORT", short)

    return set_sizes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    ascii_only=st.booleans(),
    window=st.integers(13, 60),
    short=st.integers(4, 20),
)
def test_a_long_line_gives_what_a_short_one_does(small, take, tokenize, texts, ascii_only, window, short):
    records = [{"id": str(i), "meta": {"k": [1, "x" * 30, None]}, "text": text} for i, text in enumerate(texts)]
    records.append({"text": "the last one"})
    corpus = take({"a.jsonl": "".join(json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records)})
    small(1 << 20, 1 << 20, 1 << 10)
    expected = tokenize(corpus)
    small(16, window, short)
    assert tokenize(corpus).manifest.sha256 == expected.manifest.sha256


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "' + b"x" * 90 + b'\\q"}', "broken JSON"),
        (b'{"text": "' + b"x" * 90, "broken JSON"),
        (b'{"text": "' + b"x" * 90 + b'\x01"}', "broken JSON"),
        (b'{"text": "' + b"x" * 90 + b'"', "broken JSON"),
        (b'{"text": "' + b"x" * 90 + b'\xff"}', "invalid UTF-8"),
        (b'{"text": "' + b"x" * 90 + b'\\ud800 and more"}', "lone surrogate"),
        (b'["' + b"x" * 90 + b'"]', "a JSON object is wanted"),
    ],
)
@pytest.mark.parametrize("window", [13, 37, 1 << 20])
def test_a_broken_long_line_is_refused_or_set_aside_and_the_next_one_read(
    small, take, tokenize, texts_of, line, reason, window
):
    small(16, window, 8)
    corpus = take({"a.jsonl": b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n'})
    with pytest.raises(ValueError, match=f"line 2: {reason}"):
        tokenize(corpus)
    made = tokenize(corpus, on_invalid="quarantine")
    assert texts_of(made) == ["one", "two"]
    assert made.facts.quarantined == 1


def test_a_long_text_file_is_read_and_its_fault_found(small, take, tokenize, texts_of):
    small(16, 13, 8)
    good = "\ufeffline one\r\nline two é日\r\n" * 20
    assert texts_of(tokenize(take({"a.txt": good}))) == [good.removeprefix("\ufeff").replace("\r\n", "\n")]
    with pytest.raises(ValueError, match=r"line 4: invalid UTF-8: .* at byte 58"):
        tokenize(take({"a.txt": b"a" * 18 + b"\n" + b"b" * 18 + b"\n" + b"c" * 18 + b"\n\xff" + b"d" * 50}))


def test_a_long_document_without_text_is_counted(small, take, tokenize):
    small(16, 13, 8)
    blank, null = json.dumps({"text": " \n" * 200}), json.dumps({"other": "x" * 200, "text": None})
    facts = tokenize(take({"a.jsonl": f'{blank}\n{null}\n{{"text": "good"}}\n'})).facts
    assert (facts.read, facts.empty, facts.null, facts.documents) == (3, 1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("a.jsonl", {}), ("a.txt", {}), ("a.txt", {"split_text": "separator", "separator": "<|>"})]
)
def test_memory_is_bounded_for_a_document_of_200_mb(tmp_path, take, plain_tokenizer, name, options):
    words = "The quick brown fox jumps over 1234 lazy dogs. " * 22_000
    folder = tmp_path / "huge"
    folder.mkdir()
    with (folder / name).open("w") as stream:
        stream.write('{"text": "' if name == "a.jsonl" else "")
        for _ in range(200):
            stream.write(words)
        stream.write("\n<|>\n" * bool(options))
        stream.write('"}\n' if name == "a.jsonl" else "")
    code = (
        "from crosstrain.components.core.telemetry import peak_rss_bytes\n"
        "from crosstrain.components.core.step import execute, load_config\n"
        f"corpus = dict(source={str(folder)!r}, output={str(tmp_path / 'corpus')!r})\n"
        "execute('import_data', load_config('import_data').decode(corpus))\n"
        f"values = dict(corpus={str(tmp_path / 'corpus')!r}, output={str(tmp_path / 'out')!r},"
        f" tokenizer_uri={str(plain_tokenizer)!r}, workers=1, **{options!r})\n"
        "facts = execute('tokenize', load_config('tokenize').decode(values)).artifact.facts\n"
        "print(facts.text_bytes, peak_rss_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text_bytes, peak = (int(number) for number in done.stdout.split())
    assert text_bytes == 200 * len(words)
    assert peak < LIMIT, f"{peak / 2**20:.0f} MiB"
