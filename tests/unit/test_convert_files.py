"""Safetensors directories, and directories under construction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_sao.config import ConfigError
from megatron_sao.convert.staging import Staging
from megatron_sao.weights.hf_files import (
    INDEX,
    Group,
    HFTensors,
    TensorSpec,
    WeightError,
    copy_companions,
    plan_shards,
    write_index,
    write_shard,
)
from tests.conversion import assert_same_tensors

pytestmark = pytest.mark.unit

TENSORS = {
    "bytes": torch.arange(3, dtype=torch.uint8),  # what comes after it is not aligned unless somebody sees to it
    "float": torch.randn(4, 5),
    "bfloat": torch.randn(7).bfloat16(),
    "codes": torch.randn(2, 3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "half": torch.randn(2, 2).half(),
}


def groups(tensors: dict[str, torch.Tensor]) -> list[Group]:
    return [Group((TensorSpec(n, t.dtype, tuple(t.shape)),), lambda t=t: [t]) for n, t in tensors.items()]


def write(directory: Path, tensors: dict[str, torch.Tensor], max_bytes: int) -> None:
    shards = plan_shards(groups(tensors), max_bytes)
    for shard in shards:
        write_shard(directory, shard)
    write_index(directory, shards)


def test_the_safetensors_package_reads_what_was_written_and_the_other_way_round(tmp_path: Path) -> None:
    write(tmp_path, TENSORS, 10**6)
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), TENSORS)
    tensors = {n: t for n, t in TENSORS.items() if n != "codes"}
    save_file(tensors, tmp_path / "model.safetensors")
    source = HFTensors(tmp_path)
    assert_same_tensors({name: source[name] for name in source.names()}, tensors)


def test_shards_hold_at_most_their_bytes_and_the_index_finds_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    write(tmp_path, tensors, max_bytes=100)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert {name: load_file(tmp_path / file)[name][0].item() for name, file in weight_map.items()} == {
        f"t{i}": float(i) for i in range(7)
    }


def test_a_tensor_that_is_not_as_announced_leaves_no_file(tmp_path: Path) -> None:
    (shard,) = plan_shards([Group((TensorSpec("x", torch.float32, (2,)),), lambda: [torch.zeros(3)])], 100)
    with pytest.raises(WeightError, match="x came out as"):
        write_shard(tmp_path, shard)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_file_cut_short_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(WeightError, match="fetch it again"):
        HFTensors(tmp_path)


def test_an_index_that_promises_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    with pytest.raises(WeightError, match="differ in y"):
        HFTensors(tmp_path)


def test_fp8_weights_without_their_scales_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"scales are missing .*a\.weight"):
        HFTensors(tmp_path, (4, 4))
    codes = {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 3)}
    save_file(codes, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"a\.weight_scale_inv"):
        HFTensors(tmp_path, (4, 4))


def test_everything_but_weights_is_copied(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    kept = {"config.json", "tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja"}
    for name in (*kept, "model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json", "x.gguf"):
        (source / name).write_text(name)
    copy_companions(source, copy, {"changed": True})
    assert {path.name for path in copy.iterdir()} == kept
    assert json.loads((copy / "config.json").read_text()) == {"changed": True}
    assert (copy / "tokenizer.json").read_text() == "tokenizer.json"


def test_a_directory_appears_whole_and_a_second_job_finds_the_files_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Staging(out, {"job": 1})
    first.prepare()
    (first.directory / "a").write_text("a")
    first.finish("a", note=[1])
    (first.directory / "b").write_text("b")
    first.finish("b", note=[2])
    assert not out.exists()
    (first.directory / "b").write_text("x")  # damaged after it was finished
    second = Staging(out, {"job": 1})
    second.prepare()
    assert second.note("a") == [1]
    assert second.note("b") is None
    assert second.note("c") is None
    second.publish()
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in out.iterdir()} == {"a", "b"}
    with pytest.raises(ConfigError, match=r"--out .* exists"):
        Staging(out, {"job": 1}).prepare()


def test_files_of_another_job_are_not_kept(tmp_path: Path) -> None:
    first = Staging(tmp_path / "out", {"job": 1})
    first.prepare()
    (first.directory / "a").write_text("a")
    first.finish("a")
    second = Staging(tmp_path / "out", {"job": 2})
    second.prepare()
    assert second.note("a") is None
    assert not list(second.directory.iterdir())
