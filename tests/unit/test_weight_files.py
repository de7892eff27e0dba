"""Version directories and deltas: complete or refused, bit for bit, in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_sao.models.hf import HFModel
from megatron_sao.models.mapping import Entry
from megatron_sao.weights.delta import (
    DeltaRefused,
    DeltaWriter,
    LocalCopy,
    apply,
    encode,
    publish_delta,
    read_json,
    write_json,
)
from megatron_sao.weights.disk import check_version, finish_version, remove_old, write_bucket
from megatron_sao.weights.gather import Bucket
from megatron_sao.weights.hf_files import WeightError
from megatron_sao.weights.reshard import Layout, Plan, Weight, build_plan

pytestmark = pytest.mark.unit


def make_plan() -> Plan:
    norm = Weight(Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"), ((3,),), torch.float32)
    head = Weight(Entry("output_layer.weight", ("lm_head.weight",), "vocab"), ((5, 6),), torch.bfloat16)
    return build_plan([head, norm], Layout(1, ()), 60, sources=(0,))  # a bucket each


def make_buckets(seed: int) -> list[Bucket]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "lm_head.weight": torch.randn(5, 6, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(3, generator=generator),
    }
    buckets = []
    for name, tensor in tensors.items():
        data = tensor.view(-1).view(torch.uint8).clone()
        buckets.append(Bucket(data, [(name, data.view(tensor.dtype).view(tensor.shape))]))
    return buckets


def write_full(root: Path, version: str, buckets: list[Bucket]) -> Path:
    model = root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    temporary, final = root / "full" / f"{version}.tmp", root / "full" / version
    temporary.mkdir(parents=True)
    for number, bucket in enumerate(buckets):
        write_bucket(temporary, 0, number, bucket)
    finish_version(temporary, final, make_plan(), HFModel(model, {"dtype": "float32"}, "llama"))
    return final


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_holds(directory: Path, buckets: list[Bucket]) -> None:
    expected = dict(pair for bucket in buckets for pair in bucket.tensors)
    found = loaded(directory)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])


def test_a_version_directory_holds_the_tensors_the_config_and_an_index(tmp_path: Path) -> None:
    final = write_full(tmp_path, "1.1", make_buckets(0))
    assert_holds(final, make_buckets(0))
    assert json.loads((final / "config.json").read_text()) == {"dtype": "bfloat16"}
    assert not final.with_name("1.1.tmp").exists()
    index = json.loads((final / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert name in load_file(final / file)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.unlink(), "cannot read .*model-00000-00001.safetensors"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has .* bytes, but its header describes"),
        (lambda path: path.write_bytes(b"\xff" * 20), "it is cut short"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"F32", b"I32")), "model.norm.weight is .*int32"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"norm.w", b"worm.w")),
            "does not list what the files hold",
        ),
    ],
)
def test_a_directory_that_sglang_would_take_silently_is_refused_by_name(damage, sentence: str, tmp_path: Path) -> None:
    final = write_full(tmp_path, "1.1", make_buckets(0))
    damage(final / "model-00000-00001.safetensors")
    with pytest.raises(WeightError, match=sentence):
        check_version(final, make_plan())


def test_the_two_newest_versions_stay_and_what_was_never_finished_goes(tmp_path: Path) -> None:
    for number in range(4):
        final = write_full(tmp_path, f"1.{number}", make_buckets(number))
        (tmp_path / "full" / "9.9.tmp").mkdir()
        remove_old(final.parent, final)
    assert sorted(path.name for path in final.parent.iterdir()) == ["1.2", "1.3"]


@given(
    size=st.sampled_from([1, 7, 65_535, 65_536, 65_537, 200_000]), fraction=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_a_change_applied_gives_the_new_tensor_bit_for_bit(size: int, fraction: float, dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(size, generator=generator).to(dtype)
    new = torch.where(torch.rand(size, generator=generator) < fraction, -old, old)
    change = encode(old, new)
    patched = old.clone()
    apply(change, patched)
    assert torch.equal(patched, new)
    assert len(change.values) == int((old != new).sum())
    assert change.nbytes == len(change.values) * (2 + dtype.itemsize) + 4 * -(-size // 65_536)


def test_a_change_of_sign_of_zero_and_a_nan_are_bits_like_any_other() -> None:
    old, new = torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0])
    change = encode(old, new)
    apply(change, old)
    assert len(change.values) == 1 and str(old[0]) == str(new[0])


class Trainer:
    """The writing side, as the publisher drives it."""

    def __init__(self, root: Path) -> None:
        self.root, self.writer = root, DeltaWriter()

    def full(self, version: str, buckets: list[Bucket]) -> None:
        write_full(self.root, version, buckets)
        for number, bucket in enumerate(buckets):
            self.writer.remember(number, bucket)
        self.announce(version)

    def delta(self, version: str, buckets: list[Bucket]) -> Path:
        temporary, final = self.root / "deltas" / f"{version}.tmp", self.root / "deltas" / version
        temporary.mkdir(parents=True)
        for number, bucket in enumerate(buckets):
            self.writer.write(temporary, 0, number, bucket)
        publish_delta(temporary, final, self.writer.version)
        self.announce(version)
        return final

    def announce(self, version: str) -> None:
        self.writer.version = version
        write_json(self.root / "latest.json", {"version": version})


@pytest.fixture
def copy(tmp_path: Path) -> LocalCopy:
    return LocalCopy(tmp_path, "engine-0", tmp_path / "copies" / "engine-0")


def report(root: Path) -> dict:
    return read_json(root / "engines" / "engine-0.json")


def test_a_copy_follows_full_versions_and_deltas_and_says_where_it_is(tmp_path: Path, copy: LocalCopy) -> None:
    trainer = Trainer(tmp_path)
    copy.advance()
    assert report(tmp_path) == {}
    trainer.full("1.0", make_buckets(0))
    copy.advance()
    assert_holds(Path(report(tmp_path)["path"]), make_buckets(0))
    trainer.delta("1.1", make_buckets(1))
    trainer.delta("1.2", make_buckets(2))  # two at once: a sidecar that was slow
    copy.advance()
    assert report(tmp_path)["version"] == "1.2" and report(tmp_path)["error"] is None
    assert_holds(Path(report(tmp_path)["path"]), make_buckets(2))


def test_one_changed_element_is_a_delta_too(tmp_path: Path, copy: LocalCopy) -> None:
    trainer, buckets = Trainer(tmp_path), make_buckets(0)
    trainer.full("1.0", buckets)
    copy.advance()
    buckets[0].tensors[0][1][3, 4] = 7.0
    trainer.delta("1.1", buckets)
    copy.advance()
    assert report(tmp_path)["version"] == "1.1"
    assert_holds(tmp_path / "copies" / "engine-0", buckets)


def test_a_delta_out_of_order_is_refused_and_changes_nothing(tmp_path: Path, copy: LocalCopy) -> None:
    trainer = Trainer(tmp_path)
    trainer.full("1.0", make_buckets(0))
    copy.advance()
    first, second = trainer.delta("1.1", make_buckets(1)), trainer.delta("1.2", make_buckets(2))
    with pytest.raises(DeltaRefused, match=r"1.2 starts from 1.1, but the copy holds 1.0"):
        copy.apply(second)
    assert copy.version == "1.0"
    assert_holds(tmp_path / "copies" / "engine-0", make_buckets(0))
    copy.apply(first)
    copy.apply(second)
    assert copy.version == "1.2"


def test_a_broken_chain_or_copy_asks_for_a_full_version_and_gets_it(tmp_path: Path, copy: LocalCopy) -> None:
    trainer = Trainer(tmp_path)
    trainer.full("1.0", make_buckets(0))
    copy.advance()
    file = tmp_path / "copies" / "engine-0" / "model-00000-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    trainer.delta("1.1", make_buckets(0))  # nothing changed, so nothing repairs the bit
    copy.advance()
    assert (
        report(tmp_path)["version"] is None and "lm_head.weight does not have the checksum" in report(tmp_path)["error"]
    )
    trainer.delta("1.2", make_buckets(2))
    (tmp_path / "full" / "1.0").rename(tmp_path / "full" / "gone")
    copy.advance()
    assert report(tmp_path)["version"] is None and "no chain of deltas" in report(tmp_path)["error"]
    write_full(tmp_path, "1.3", make_buckets(3))
    trainer.announce("1.3")
    copy.advance()
    assert report(tmp_path)["version"] == "1.3"
    assert_holds(Path(report(tmp_path)["path"]), make_buckets(3))
