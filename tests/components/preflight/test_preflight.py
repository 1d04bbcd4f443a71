"""Preflight: every check seen to find its fault, and to keep silent without it."""

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crosstrain.components.core.artifact import Artifact
from crosstrain.components.core.launch.instances import load_instances
from crosstrain.components.core.presets import PRESETS
from crosstrain.components.core.step import execute, load_config
from crosstrain.components.preflight import machines, places
from crosstrain.components.preflight.program import check

GPU = "registry.example.com:1/gpu@sha256:" + "0" * 64


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., list[str]]:
    """A function that checks a small sound run with some values changed, and gives the findings' lines."""

    def found(train: dict[str, Any] | None = None, tune: dict[str, Any] | None = None, **values: Any) -> list[str]:
        values = {"output": str(tmp_path / "out"), "preset": "tiny", "precision": "bf16", "vocab_size": 4096,
                  "sequence_length": 256, "train_steps": 10, **values}  # fmt: skip
        sections = {"train_fp8": train or {}, "finetune_lora": tune or {}, **values.pop("sections", {})}
        config = load_config("preflight").decode({**values, "sections": sections}, "preflight")
        return [finding.line for finding in check(config)]

    return found


def on(instance: str, **settings: Any) -> dict[str, Any]:
    return {"target": "trainjob", "instance_type": instance, "image": GPU, **settings}


def of(found: list[str], *words: str) -> list[str]:
    return [line for line in found if all(word in line for word in words)]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


def test_a_sound_run_has_no_findings_and_leaves_nothing(lines, tmp_path):
    assert lines(tune_steps=5, precision="fp8") == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_every_finding_comes_at_once_errors_first(lines, tmp_path):
    found = lines(
        train={"run_on": on("ml.p4d.24xlarge"), "global_batch_size": 12, "micro_batch_size": 4}, precision="fp8",
        corpus=str(tmp_path / "none"), sections={"shard": {"sed": 1}},
    )  # fmt: skip
    assert of(found, "error: shard", "sed: unknown option", "did you mean 'seed'")
    assert of(found, "error: storage of corpus", "nothing is there")
    assert of(found, "error: train_fp8 layout", "12 does not divide over 8", "nearest layout")
    assert of(found, "error: train_fp8 device", "A100", "no FP8", "use precision bf16")
    levels = [line.split(":")[0] for line in found]
    assert levels == sorted(levels, key=["error", "warning", "not checked"].index)


def test_an_error_ends_the_step_and_a_warning_does_not(tmp_path):
    values = {"output": str(tmp_path / "out"), "corpus": str(tmp_path / "none")}
    config = load_config("preflight")
    with pytest.raises(ValueError, match=r"preflight found 1 error, 0 warnings, 0 not checked:\n  error: storage of"):
        execute("preflight", config.decode(values))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.jsonl").write_text("{}")
    result = execute("preflight", config.decode(values))
    assert result.metrics == {"warnings": 0, "not_checked": 0} and "Nothing was found" in result.markdown
    assert Artifact.open(str(tmp_path / "out"), "preflight").facts.checks


def test_storage_is_written_read_and_deleted(lines, store_uri):
    assert lines(output=store_uri, state=f"{store_uri}/state", preset="") == []


def test_storage_that_may_only_be_read(lines, s3_uri, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-reader-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-reader-secret")
    (line,) = lines(output=s3_uri, preset="")
    assert line.startswith(f"error: storage of artifacts {s3_uri}:") and "refused the credentials" in line


def test_storage_that_does_not_delete(lines, monkeypatch):
    monkeypatch.setattr("crosstrain.components.core.storage.LocalStore.delete", lambda self, key: None)
    (line,) = lines(preset="")
    assert "is still there after it was deleted; allow deleting" in line


def test_storage_that_gives_something_else(lines, monkeypatch):
    monkeypatch.setattr("crosstrain.components.core.storage.LocalStore.read", lambda self, key: b"stale")
    (line,) = lines(preset="")
    assert "what was written is not what is read" in line


def test_sources_that_are_missing_in_a_bucket(lines, s3_uri):
    from crosstrain.components.core.storage import open_store

    open_store(s3_uri).write("there/a.jsonl", b"{}")
    assert lines(corpus=f"{s3_uri}/there", model=f"{s3_uri}/there/a.jsonl", preset="") == []
    (line,) = lines(corpus=f"{s3_uri}/nowhere", preset="")
    assert line.startswith("error: storage of corpus") and "nothing is there; correct the URI" in line


def test_without_credentials_it_is_said_once(lines, aws_environment, monkeypatch):
    aws_environment("http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = lines(output="s3://bucket/a", state="s3://bucket/b", preset="")
    assert [line.split(":")[0] for line in found] == ["error", "not checked", "not checked"]
    assert "no S3 credentials: set AWS_ACCESS_KEY_ID" in found[0]


@pytest.mark.parametrize(
    ("lasts", "hours", "wanted"),
    [
        (None, 0, "warning: credentials: AWS_ACCESS_KEY_ID in the environment are temporary, nobody says until when"),
        (2, 0, "warning: credentials: AWS_ACCESS_KEY_ID in the environment expire in 2.0 h"),
        (2, 12, "error: credentials: AWS_ACCESS_KEY_ID in the environment expire in 2.0 h, and the run may take 12 h"),
        (24, 12, ""),
        (-1, 0, "error: credentials: AWS_ACCESS_KEY_ID in the environment expired 1.0 h ago"),
        (-1, 12, "error: credentials: AWS_ACCESS_KEY_ID in the environment expired 1.0 h ago"),
    ],
)
def test_credentials_that_end_before_the_run(lasts, hours, wanted, s3_uri, lines, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    if lasts is not None:
        end = datetime.now(UTC) + timedelta(hours=lasts, seconds=9)
        monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", end.isoformat())
    config = load_config("preflight").decode({"output": s3_uri, "hours": hours})
    (line,) = [finding.line for finding in places.check_credentials(config)] or [""]
    assert line.startswith(wanted) and bool(line) == bool(wanted)
    assert not line or "Pod Identity" in line


def test_an_end_of_credentials_that_is_no_time_is_a_finding(s3_uri, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "tomorrow")
    (finding,) = places.check_credentials(load_config("preflight").decode({"output": s3_uri}))
    assert finding.line.startswith("error: credentials: AWS_CREDENTIAL_EXPIRATION: ") and "'tomorrow'" in finding.line


def test_credentials_that_are_renewed_or_permanent_are_no_finding(s3_uri):
    config = load_config("preflight").decode({"output": s3_uri, "hours": 1000})
    assert list(places.check_credentials(config)) == []


def test_the_model_against_batch_positions_and_precision(lines):
    assert of(lines(sequence_length=4096), "error", "sequence_length 4096 is above the model's 2048 positions")
    odd = {"hidden_size": 72, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = lines(train={"model_config_json": json.dumps(odd)}, precision="fp8")
    assert of(found, "error", "hidden_size in multiples of 16, not 72; nearest: ")
    assert of(found, "error", "intermediate_size in multiples of 16, not 200")
    assert not of(lines(train={"model_config_json": json.dumps(odd)}), "multiples")


@pytest.mark.parametrize(
    ("train", "tune", "words"),
    [
        ({"run_on": on("ml.trn1.32xlarge")}, {}, ["train_fp8 does not run on ml.trn1.32xlarge (AWS Trainium)"]),
        ({"run_on": on("ml.m5.4xlarge"), "device": "cuda"}, {}, ["device cuda", "no CUDA device"]),
    ],
)
def test_what_the_device_cannot_do(train, tune, words, lines):
    found = lines(train=train, tune=tune, tune_steps=5)
    assert of(found, "error", " device: ", *words)


def test_hardware_that_can_is_no_finding(lines):
    tune = {"run_on": on("ml.trn1.32xlarge"), "global_batch_size": 128, "neuron": {"tensor_parallel": 2}}
    found = lines(train={"run_on": on("ml.p5.48xlarge")}, tune=tune, tune_steps=5, precision="fp8")
    assert not of(found, " device: ") and not of(found, "error")


def tuned_on_trainium(**tune: Any) -> dict[str, Any]:
    place = {"run_on": on("ml.trn1.32xlarge", nodes=2), "base_dtype": "bfloat16"}
    return {"tune": {**place, "global_batch_size": 8, "micro_batch_size": 1, **tune},
            "tune_steps": 5, "preset": "8b", "vocab_size": 65_536, "sequence_length": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"neuron": {"tensor_parallel": 7}}, "64 processes do not divide into neuron.tensor_parallel 7"),
        ({"global_batch_size": 12}, "does not divide into 8 data-parallel ranks"),
        ({"neuron": {"tensor_parallel": 64}}, "does not divide the model's num_attention_heads 32"),
        ({"method": "dora"}, "backend optimum_neuron: method='dora'"),
        ({"activation_checkpointing": "full"}, "set neuron.gradient_checkpointing=true instead"),
        ({"backend": "torch"}, "backend torch does not reach the NeuronCores of ml.trn1.32xlarge"),
    ],
)
def test_trainium_is_held_to_its_own_layout(tune, words, lines):
    assert of(lines(**tuned_on_trainium(**tune)), "error: finetune_lora layout", words)


def test_memory_of_a_neuron_core_is_for_its_part_of_the_model(lines):
    found = lines(**tuned_on_trainium(neuron={"gradient_checkpointing": True}))
    assert not of(found, "finetune_lora layout") and not of(found, "finetune_lora memory")
    (line,) = of(lines(**tuned_on_trainium()), "finetune_lora memory")
    assert line.startswith("error:") and "ml.trn1.32xlarge has 16.0 GiB for each" in line


def test_a_fault_of_one_step_is_told_of_that_step_alone(lines):
    (line,) = of(lines(train={"glob_batch": 1}, tune_steps=5), "glob_batch")
    assert line.startswith("error: train_fp8: ")


def test_memory_that_is_too_small_or_close(lines):
    big = {"run_on": on("ml.p5.48xlarge"), "global_batch_size": 8, "micro_batch_size": 1}
    (line,) = of(lines(train=big, preset="8b", sequence_length=8192, vocab_size=128_256), "train_fp8 memory")
    assert line.startswith("error:") and "ml.p5.48xlarge has 80.0 GiB for each" in line and "optimizer 7.5" in line
    two = {**big, "run_on": on("ml.p5.48xlarge", nodes=2), "global_batch_size": 16}
    near = {**two, "activation_checkpointing": "selective"}
    (line,) = of(lines(train=near, preset="8b", sequence_length=13_312, vocab_size=65_536), "train_fp8 memory")
    assert line.startswith("warning:") and "close" in line
    assert not of(lines(train=near, preset="8b", sequence_length=8192, vocab_size=65_536), "memory")
    assert not of(lines(train=two, preset="8b", sequence_length=2048, vocab_size=65_536), "memory")


def weights_and_activations(line: str) -> tuple[float, float]:
    weights, activations = re.findall(r"(?:weights|activations) ([\d.]+)", line)
    return float(weights), float(activations)


def test_a_base_in_half_precision_takes_half(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "_machine_bytes", lambda: 2**20)
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, **PRESETS["1b"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    told = {}
    for dtype in ("float32", "bfloat16"):
        tune = {"base_dtype": dtype, "rank": 1}
        found = lines(preset="", model=str(tmp_path / "model"), tune=tune, tune_steps=5)
        (line,) = of(found, "error: finetune_lora memory")
        told[dtype] = weights_and_activations(line)[0]
    assert told["float32"] == pytest.approx(2 * told["bfloat16"], abs=0.15)


def test_a_stage_holds_the_passes_that_are_in_flight(lines, monkeypatch):
    monkeypatch.setattr(machines, "_device_bytes", lambda instance, training: 1.0)
    step = {"pipeline_parallel": 4, "tensor_parallel": 2, "micro_batch_size": 1, "run_on": on("ml.p5.48xlarge")}
    large = {"preset": "8b", "sequence_length": 65_536, "vocab_size": 256}
    told = []
    for batch, schedule in ((1, "gpipe"), (4, "1f1b"), (8, "1f1b"), (8, "gpipe")):
        train = {**step, "global_batch_size": batch, "pipeline_schedule": schedule}
        told.append(weights_and_activations(of(lines(train=train, **large), "memory", "needs")[0])[1])
    assert told == pytest.approx([told[0], 4 * told[0], 4 * told[0], 8 * told[0]], rel=0.01)


def test_memory_of_this_machine(lines, monkeypatch):
    monkeypatch.setattr(machines, "_machine_bytes", lambda: 2**30)
    (line,) = of(lines(preset="125m", sequence_length=2048), "train_fp8 memory")
    assert line.startswith("error:") and "this machine has 1.0 GiB" in line


def test_a_containers_limit_is_its_memory(monkeypatch, tmp_path):
    (tmp_path / "limit").write_text("1000\n")
    monkeypatch.setattr(machines, "CGROUP_LIMITS", (str(tmp_path / "limit"), str(tmp_path / "none")))
    assert machines._machine_bytes() == 1000


@pytest.mark.parametrize(
    ("name", "processes", "gib"), [("m5.4xlarge", 2, 32), ("p5.48xlarge", 8, 80), ("p5.48xlarge", 2, 80)]
)
def test_a_process_has_its_part_of_the_nodes_memory(name, processes, gib):
    training = SimpleNamespace(processes=processes, run_on=SimpleNamespace(nodes=1))
    assert machines._device_bytes(load_instances("").find(name), training) == gib * 2**30


def test_memory_is_not_guessed(lines, monkeypatch):
    (line,) = of(lines(vocab_size=0, sequence_length=0), "not checked: train_fp8 memory")
    assert "its vocabulary and sequence_length not known before the run" in line
    found = lines(train={"run_on": {"target": "trainjob", "image": GPU}})
    assert of(found, "not checked: train_fp8 memory", "needs about", "not known here")
    assert of(found, "not checked: train_fp8 device", "no instance_type")
    monkeypatch.setenv("KFP_POD_NAME", "pod")
    assert of(lines(), "not checked: train_fp8 memory", "the pod's memory is not known here")


def test_a_model_to_tune_is_read_from_where_it_lies(lines, save_model, tmp_path):
    folder = save_model(tmp_path / "model")
    found = lines(preset="", model=str(folder), tune_steps=5, sequence_length=4096)
    assert of(found, "error: finetune_lora layout", "above the model's 256 positions")
    monkey = lines(preset="", model=str(tmp_path / "none"), tune_steps=5)
    assert of(monkey, "error: storage of model", "nothing is there")
    assert of(monkey, "not checked: finetune_lora memory", "the model's shape and its vocabulary not known")


def test_disks_that_are_too_small(lines, monkeypatch, tmp_path):
    monkeypatch.setattr(places.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000_000))
    found = of(lines(), "error: train_fp8 disk")
    assert len(found) == 2 and "GiB free; free some" in found[0]
    assert of(lines(train={"run_on": on("ml.p5.48xlarge")}), "not checked: train_fp8 disk", "other pods")


def test_a_cluster_that_is_not_reached_is_not_checked(lines):
    assert of(lines(train={"run_on": on("ml.p5.48xlarge")}), "not checked: train_fp8 cluster", "kubeconfig")


def test_sections_of_steps_that_take_what_the_run_has_yet_to_make(lines):
    sections = {"tokenize_join": {}, "tokenize_partition": {}, "compare_arms": {}, "merge": {}, "evaluate": {}}
    assert lines(sections=sections) == []


def test_an_unknown_section_is_named(lines):
    assert of(lines(sections={"train_fp16": {}}), "error: config.train_fp16: no such component; known: preflight")


def test_no_process_is_told_to_import_torch(tmp_path):
    import subprocess
    import sys

    values = {"output": str(tmp_path / "out"), "preset": "tiny"}
    code = (
        "import sys; from crosstrain.components.core.step import execute, load_config;"
        f"execute('preflight', load_config('preflight').decode({values!r}));"
        "print([m for m in ('torch', 'transformers', 'kubernetes', 'kfp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"
