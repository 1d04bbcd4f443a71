"""import_model: the manifest tells what the folder holds, and a folder that a later step would trip over is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosstrain.components.core.artifact import hash_file
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.core.storage import open_store


def test_facts_are_those_of_the_model(save_model, import_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "base", dtype="bfloat16", shard="60KB")
    (folder / "README.md").write_text("not part of the model")
    artifact = import_model(folder)
    facts = artifact.facts
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.architecture, facts.dtype, facts.vocab_size) == ("LlamaForCausalLM", "bfloat16", 384)
    assert (facts.max_sequence_length, facts.tied_embeddings, facts.precision) == (256, False, "imported")
    assert facts.tokenizer_sha256 == hash_file(folder / "tokenizer.json")
    listed = {file.path: file.sha256 for file in artifact.manifest.files}
    assert listed == {p.name: hash_file(p) for p in folder.iterdir() if p.name != "README.md"}
    assert artifact.fetch_all() == folder
    assert {path.name for path in Path(artifact.uri).iterdir()} == {"manifest.json", "run.json"}


def test_tied_embeddings_are_counted_once(save_model, import_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "base", tie_word_embeddings=True, tokenizer=False)
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    facts = import_model(folder).facts
    assert (facts.parameters, facts.tied_embeddings, facts.tokenizer_sha256) == (count, True, None)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert import_model(folder).facts.parameters == count


def test_a_prefix_in_object_storage_gives_the_same_manifest(save_model, import_model, s3_uri, tmp_path) -> None:
    folder = save_model(tmp_path / "base", shard="60KB")
    store = open_store(f"{s3_uri}/llama 3+ü")
    for path in folder.iterdir():
        store.upload(path, path.name)
    values = {"source": store.uri + "/", "output": f"{s3_uri}/model"}
    remote = execute("import_model", load_config("import_model").decode(values)).artifact.manifest
    local = import_model(folder).manifest
    assert (remote.files, remote.facts) == (local.files, local.facts)
    assert remote.base == store.uri


def _edit(**options: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        settings = json.loads(path.read_text()) | options
        path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))

    return edit


def _lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _lose_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _pickle(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _tear(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-5])


def _garble(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:8] + b"x" + path.read_bytes()[9:])


def _empty(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"")


def _move_tensor(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = next(f for f in files if f != index["weight_map"]["lm_head.weight"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (_lose_config, FileNotFoundError, r"config.json: not there; give the folder that save_pretrained wrote"),
        (_lose_shard, FileNotFoundError, r"names \d+ files and 1 of them are missing \(first: model-00002-of"),
        (_pickle, ValueError, r"pytorch_model.bin: pickled weights can run code and are refused"),
        (_tear, ValueError, r"torn: \d+ bytes, and its header promises"),
        (_garble, ValueError, r"unreadable safetensors header"),
        (_empty, ValueError, r"no safetensors header \(0 bytes\)"),
        (_move_tensor, ValueError, r"the files disagree on lm_head.weight"),
        (_edit(architectures=["GPT2LMHeadModel"]), ValueError, r"names GPT2LMHeadModel; supported: .*LlamaForCausalLM"),
        (_edit(architectures=None), ValueError, r"names no architecture"),
        (_edit(quantization_config={"bits": 4}), ValueError, r"quantised"),
        (_edit(vocab_size=400), ValueError, r"vocab_size 400, model.embed_tokens.weight: 384 rows"),
        (_edit(max_position_embeddings=None), ValueError, r"lacks max_position_embeddings"),
    ],
)
def test_refuses_what_a_later_step_would_trip_over(save_model, import_model, tmp_path, harm, error, message) -> None:
    folder = save_model(tmp_path / "base", shard="60KB")
    harm(folder)
    with pytest.raises(error, match=message):
        import_model(folder)
    assert not (tmp_path / "base.model" / "manifest.json").exists()


def test_a_missing_output_layer_is_refused(save_model, import_model, tmp_path) -> None:
    folder = save_model(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head.weight is missing, and config.json does not say tie_word_embeddings"
    ):
        import_model(folder)


def test_a_file_changed_afterwards_is_found(save_model, import_model, tmp_path) -> None:
    folder = save_model(tmp_path / "base")
    artifact = import_model(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(ValueError, match="damaged or was replaced"):
        artifact.fetch_all()


def test_runs_without_torch(save_model, tmp_path) -> None:
    folder = save_model(tmp_path / "base")
    code = (
        "import sys\n"
        "from crosstrain.components.core.step import main\n"
        f"main('import_model', ['--source', {str(folder)!r}, '--output', {str(tmp_path / 'out')!r}])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
