"""Hugging Face to Megatron under any layout and back: the same names, dtypes, shapes and bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_sao.config import ConfigError, ParallelConfig
from megatron_sao.convert import hf_to_megatron, megatron_to_hf
from megatron_sao.convert.parity import compare
from megatron_sao.models.backend import Backend
from megatron_sao.trainer.checkpoint import CheckpointError
from megatron_sao.trainer.main import Run
from megatron_sao.weights import megatron_files
from megatron_sao.weights.hf_files import WeightError
from tests.conversion import assert_same_tensors, dequantise_by_loops, rewrite, tensors_of
from tests.distributed.offline import offline_config
from tests.distributed.walk_conversion import MODELS, SHARD_BYTES, TRAINED, layouts
from tests.distributed.walk_resharding import train
from tests.tiny_models import write_glm4_moe

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

MTP, FP8 = "glm4_moe_bfloat16_mtp", "deepseek_v3_fp8"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, write in MODELS.items():
        write(root / name)
    return root


@pytest.fixture(scope="module")
def converted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model under every layout of two ranks, as NAME-LAYOUT; one torchrun for all."""
    out = tmp_path_factory.mktemp("converted")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    walk = [*torchrun, "-m", "tests.distributed.walk_conversion", str(models), str(out)]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def to_megatron(source: Path, out: Path) -> Path:
    hf_to_megatron.convert(source, out, ParallelConfig(), SHARD_BYTES)
    return out


def to_hf(source: Path, out: Path, hf: Path | None = None, dtype: str = "source") -> Path:
    megatron_to_hf.convert(source, out, hf, dtype, SHARD_BYTES)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back_from_every_layout_is_exact(
    name: str, world: Backend, models: Path, converted: Path, tmp_path: Path
) -> None:
    expected = tensors_of(models / name)
    for layout in layouts(name):
        out = to_hf(converted / f"{name}-{layout}", tmp_path / layout)
        assert_same_tensors(tensors_of(out), expected)
        assert (out / "config.json").read_bytes() == (models / name / "config.json").read_bytes()


def test_the_trainer_loads_a_converted_directory_as_a_checkpoint_and_exports_what_it_was_made_from(
    world: Backend, models: Path, converted: Path
) -> None:
    for name, saved, loaded in TRAINED:
        exported = converted / f"{name}-{saved}-{loaded}" / "hf"
        expected = tensors_of(models / name)
        if name == FP8:
            scales = {n for n in expected if n.endswith("_scale_inv")}
            codes = {scale.removesuffix("_scale_inv") for scale in scales}
            expected |= {n: dequantise_by_loops(expected[n], expected[f"{n}_scale_inv"], (16, 16)) for n in codes}
            expected = {n: t for n, t in expected.items() if n not in scales}
            assert "quantization_config" not in json.loads((exported / "config.json").read_text())
        assert_same_tensors(tensors_of(exported), expected)
    assert (converted / f"{MTP}-tp2-pp2" / "hf" / "chat_template.jinja").is_file()


def test_a_run_starts_from_the_weights_of_the_converted_directory(
    world: Backend, models: Path, batches: Path, tmp_path: Path
) -> None:
    source = models / "glm4_moe"
    other = shutil.copytree(source, tmp_path / "other")
    tensors = {name: tensor * 2 for name, tensor in tensors_of(source).items()}
    converted = to_megatron(rewrite(other, tensors), tmp_path / "megatron")
    config = offline_config(source, model={"path": str(source), "megatron_path": str(converted)})
    stage = Run(config, tmp_path / "run", batches, world)._rl_stage(0)
    assert_same_tensors(dict(stage.exporter.tensors()), tensors)
    policy, critic = (part.trainable.chunks[0].state_dict() for part in (stage.policy, stage.critic))
    name = "decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight"
    assert torch.equal(critic[name], policy[name])
    assert critic["output_layer.weight"].shape == (1, 48)  # its own


def test_the_policy_of_a_training_checkpoint_is_exported_with_the_original_s_other_files(
    world: Backend, models: Path, batches: Path, tmp_path: Path
) -> None:
    model = write_glm4_moe(tmp_path / "model", layers=2)
    train(model, batches, tmp_path / "run", world, "single", 0, 2)
    checkpoint = tmp_path / "run" / "checkpoints" / "rl-2"
    out = to_hf(checkpoint, tmp_path / "out", hf=model)
    assert_same_tensors(tensors_of(out), tensors_of(tmp_path / "run" / "hf"))
    assert not torch.equal(tensors_of(out)["model.norm.weight"], tensors_of(model)["model.norm.weight"])
    with pytest.raises(ConfigError, match="carries neither config nor tokenizer"):
        to_hf(checkpoint, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"another config\.json"):
        to_hf(checkpoint, tmp_path / "other", hf=models / "glm4_moe")


def without(name: str):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without("model.layers.2.mlp.experts.3.up_proj.weight"), r"missing .*experts\.3\.up_proj"),
        (lambda t: t.update({"model.layers.9.extra": torch.zeros(1)}), r"unexpected .*layers\.9\.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"mis-shaped .*norm\.weight \(7,\) instead"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_listed_and_nothing_is_left(
    damage, sentence: str, world: Backend, models: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(models / "glm4_moe", tmp_path / "source")
    tensors = tensors_of(source)
    damage(tensors)
    with pytest.raises(WeightError, match=sentence):
        to_megatron(rewrite(source, tensors), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tied_head_that_differs_from_the_embedding_is_refused(world: Backend, models: Path, tmp_path: Path) -> None:
    source = shutil.copytree(models / "llama_tied", tmp_path / "source")
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    expected = tensors_of(models / "llama_tied")
    out = to_hf(to_megatron(rewrite(source, tensors), tmp_path / "megatron"), tmp_path / "out")
    assert_same_tensors(tensors_of(out), expected)  # a copy is not exported twice
    tensors["lm_head.weight"][0] += 1
    with pytest.raises(WeightError, match="tie_word_embeddings"):
        to_megatron(rewrite(source, tensors), tmp_path / "other")


def test_a_checkpoint_that_lacks_or_exceeds_the_model_is_refused_by_name(
    world: Backend, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = to_megatron(models / "glm4_moe", tmp_path / "megatron")
    read = megatron_files.FileSystemReader.read_metadata

    def changed(reader: object) -> object:
        metadata = read(reader)
        state = metadata.state_dict_metadata
        state["policy.extra"] = state["policy.decoder.final_layernorm.weight"]
        del state["policy.decoder.layers.2.mlp.router.expert_bias"]
        state["policy.output_layer.weight"].size = torch.Size([23, 50])
        return metadata

    monkeypatch.setattr(megatron_files.FileSystemReader, "read_metadata", changed)
    with pytest.raises(WeightError) as error:
        to_hf(converted, tmp_path / "out")
    assert "missing ['policy.decoder.layers.2.mlp.router.expert_bias']" in str(error.value)
    assert "unexpected ['policy.extra']" in str(error.value)
    assert "policy.output_layer.weight (23, 50) instead of (23, 48)" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["__0_1.distcp", ".metadata", "hf/model.safetensors", "source.json"])
def test_damage_to_a_converted_directory_is_found(file: str, world: Backend, models: Path, tmp_path: Path) -> None:
    hf_to_megatron.convert(models / MTP, tmp_path / "megatron", ParallelConfig(), 10**5)
    path = tmp_path / "megatron" / file
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"damaged|cannot be read"):
        to_hf(tmp_path / "megatron", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("direction", ["to_megatron", "to_hf"])
def test_an_interrupted_conversion_goes_on_with_the_files_it_had(
    direction: str, world: Backend, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = models / MTP, to_megatron
    module, writer = hf_to_megatron, "_write_part"
    if direction == "to_hf":
        source, run = to_megatron(models / MTP, tmp_path / "megatron"), to_hf
        module, writer = megatron_to_hf, "write_shard"
    written: list[str] = []
    original = getattr(module, writer)

    def write(*args):
        file = args[1].file if direction == "to_hf" else args[0].name
        if len(written) == 3:
            (tmp_path / "out.partial" / "data" / f"{file}.tmp").write_bytes(b"half of it")
            raise KeyboardInterrupt
        written.append(file)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, writer, write)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out")
    first = list(written)
    (tmp_path / "out.partial" / "data" / first[1]).write_bytes(b"damaged")
    assert not (tmp_path / "out").exists()

    def note(*args):
        written.append(args[1].file if direction == "to_hf" else args[0].name)
        return original(*args)

    monkeypatch.setattr(module, writer, note)
    run(source, tmp_path / "out")
    again = written[3:]
    assert first[1] in again
    assert first[0] not in again
    assert first[2] not in again
    back = tmp_path / "out" if direction == "to_hf" else to_hf(tmp_path / "out", tmp_path / "back")
    assert_same_tensors(tensors_of(back), tensors_of(models / MTP))
    assert not (tmp_path / "out.partial").exists()
    assert not list((tmp_path / "out").rglob("*.tmp"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("name", [MTP, FP8])
def test_exports_in_another_format_are_that_format_throughout(
    name: str, dtype: str, world: Backend, models: Path, tmp_path: Path
) -> None:
    source = tensors_of(models / name)
    if name == FP8:
        scaled = [n for n in source if f"{n}_scale_inv" in source]
        source |= {n: dequantise_by_loops(source[n], source.pop(f"{n}_scale_inv"), (16, 16)) for n in scaled}
    out = to_hf(to_megatron(models / name, tmp_path / "megatron"), tmp_path / "out", dtype=dtype)
    exported, config = tensors_of(out), json.loads((out / "config.json").read_text())
    assert config["dtype"] == ("float32" if dtype == "float32" else "bfloat16")
    assert ("quantization_config" in config) == (dtype == "fp8")
    block = config["quantization_config"]["weight_block_size"] if dtype == "fp8" else None
    assert exported.keys() >= source.keys()  # those of the layer that drafts among them
    for tensor_name, tensor in source.items():
        scale = exported.pop(f"{tensor_name}_scale_inv", None)
        actual = exported.pop(tensor_name)
        if tensor_name.endswith("e_score_correction_bias"):
            assert actual.dtype == torch.float32
        elif scale is not None:
            assert dtype == "fp8" and actual.dtype == torch.float8_e4m3fn
            actual = dequantise_by_loops(actual, scale, block)
            assert (actual - tensor).abs().max() <= tensor.abs().max() / 16  # three bits
            continue
        else:
            assert actual.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
        assert torch.equal(actual, tensor.to(actual.dtype)), tensor_name
    assert not exported


def test_an_export_in_bfloat16_loads_in_transformers_as_it_is(world: Backend, models: Path, tmp_path: Path) -> None:
    converted = to_megatron(models / FP8, tmp_path / "megatron")
    out = to_hf(converted, tmp_path / "out", dtype="bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    name = "model.layers.2.self_attn.o_proj.weight"
    assert torch.equal(reference.state_dict()[name], tensors_of(out)[name].float())
    assert compare(models / FP8, converted, ParallelConfig(), world.device, (2, 20), None).passes(1e-5)


def test_parity_tells_equal_models_from_ones_that_differ_in_one_number(
    world: Backend, models: Path, tmp_path: Path
) -> None:
    source = models / "glm_moe_dsa"
    converted = to_megatron(source, tmp_path / "megatron")
    layout, sizes = ParallelConfig(), (3, 40)
    equal = compare(source, converted, layout, world.device, sizes, None)
    assert equal.passes(1e-5)
    assert equal.tokens == 40 + 34 + 27
    assert equal.top1_agreement == 1
    changed = tensors_of(source)
    changed["model.layers.3.self_attn.o_proj.weight"][0, 0] += 1
    other = rewrite(shutil.copytree(source, tmp_path / "other"), changed)
    different = compare(other, converted, layout, world.device, sizes, None)
    assert not different.passes(1e-4)
    assert different.max_difference > different.mean_difference > 0


def test_memory_grows_neither_with_the_number_of_layers_nor_with_the_size_of_files(tmp_path: Path) -> None:
    """16 MB the largest tensor; 84 and 304 MB of them, in files of 1 GB at most."""
    models = [write_random_llama(tmp_path / f"llama-{layers}", layers) for layers in (4, 17)]
    sizes = [sum(path.stat().st_size for path in model.glob("*.safetensors")) for model in models]
    command = [sys.executable, "-m", "tests.distributed.measure_memory", str(10**9), *map(str, models)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is gone, and not kept for the next model
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = json.loads(done.stdout.splitlines()[-1])
    print(f"extra memory in MB, there and back: {sizes[0] / 1e6:.0f} MB {small}, {sizes[1] / 1e6:.0f} MB {large}")
    assert sizes[1] > 3e8
    assert max(small + large) < 6 * LARGEST_TENSOR
    assert all(after < before + LARGEST_TENSOR for before, after in zip(small, large, strict=True))
    assert_same_tensors(tensors_of(tmp_path / "llama-17-back"), tensors_of(models[1]))


LARGEST_TENSOR = 8192 * 512 * 4


def write_random_llama(directory: Path, layers: int) -> Path:
    """Random bytes of the right names and shapes, without building a model of them."""
    vocab, hidden, inner = 8192, 512, 2048
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return rewrite(directory, {name: torch.rand(shape) for name, shape in shapes.items()})


def test_plain_python_starts_the_ranks_of_the_layout(models: Path, tmp_path: Path) -> None:
    def tool(name: str, *options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, f"tools/{name}.py", *map(str, options)]
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    source, converted = models / MTP, tmp_path / "megatron"
    done = tool("convert_hf_to_megatron", "--hf", source, "--out", converted, "--tp", 2, "--shard-size", "30KB")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name[:4] for path in converted.glob("*.distcp")} == {"__0_", "__1_"}
    done = tool("check_parity", "--hf", source, "--megatron", converted, "--pp", 2, "--length", 30, "--json")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    parity = json.loads(done.stdout)
    assert parity["passed"] and parity["relative_difference"] <= 1e-5
    done = tool("convert_megatron_to_hf", "--megatron", models, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("convert_megatron_to_hf.py: ")
