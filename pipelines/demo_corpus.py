"""Two small real corpora that every Python carries: English documentation, and Python source code.

The demonstration trains on the first and fine-tunes on the second. English: the language reference in
`pydoc_data.topics` and the standard library's docstrings. Code: the standard library's functions, without
their docstrings. Nothing is downloaded.

    python -m crosstrain.pipelines.demo_corpus --out corpora
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
_MIN_ENGLISH, _MIN_CODE = 200, 300
"""Characters; shorter pieces hold too little language to learn from."""


def gather() -> tuple[list[str], list[str]]:
    """English documents and Python functions, both in a fixed order and without repeats."""
    english = dict.fromkeys(text for _, text in sorted(topics.items()) if len(text) >= _MIN_ENGLISH)
    code: dict[str, None] = {}
    for source in _modules():
        text = source.read_text(encoding="utf-8", errors="strict")
        for docstring, function in _pieces(text):
            if len(docstring) >= _MIN_ENGLISH:
                english.setdefault(docstring)
            if len(function) >= _MIN_CODE:
                code.setdefault(function)
    return list(english), list(code)


def _modules() -> Iterator[Path]:
    top = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(top.rglob("*.py")):
        if not _SKIPPED.intersection(path.relative_to(top).parts):
            yield path


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Each documented definition of a module: its docstring, and a function's source without it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            function = ""
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if docstring and len(node.body) > 1:
                    node.body = node.body[1:]
                function = ast.unparse(node)
            yield docstring, function


def write(folder: Path) -> dict[str, Path]:
    """Write `english.jsonl` and `python.jsonl`, one `{"text": …}` a line; name to path."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, documents in zip(("english", "python"), gather(), strict=True):
        paths[name] = folder / f"{name}.jsonl"
        lines = "".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)
        paths[name].write_text(lines, encoding="utf-8")
        print(f"{paths[name]}: {len(documents)} documents, {len(lines.encode()) / 1e6:.1f} MB")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m crosstrain.pipelines.demo_corpus", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("corpora"), help="folder to write into [default: corpora]")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
