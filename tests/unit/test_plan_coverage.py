"""Whether the ranks of a plan hold a checkpoint is told from what is on disk, and every way not to is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_sao.config import ModelConfig, ParallelConfig
from megatron_sao.models.hf import HFModel, read_hf_model, transformer_config
from megatron_sao.models.mapping import shard
from megatron_sao.plan.coverage import Coverage, Holdings, coverage
from megatron_sao.plan.oracle import tensors_on_disk
from megatron_sao.plan.report import names_of
from megatron_sao.plan.simulate import Place
from tests import tiny_models

pytestmark = pytest.mark.unit

EXPERT = "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"
EXPERT_ON_DISK = [f"model.layers.2.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")]


@pytest.mark.parametrize(
    "write",
    [
        tiny_models.write_llama, tiny_models.write_qwen3, tiny_models.write_qwen3_moe, tiny_models.write_glm4_moe,
        tiny_models.write_deepseek_v3, tiny_models.write_glm_moe_dsa,
    ],
)  # fmt: skip
def test_names_and_shapes_foretold_are_those_of_a_saved_checkpoint(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "model")
    with safe_open(path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    (tmp_path / "model" / "model.safetensors").unlink()
    assert tensors_on_disk(path)[0] == saved


def test_a_draft_layer_is_one_more_layer_of_the_last_kind_and_what_belongs_to_it(tmp_path: Path) -> None:
    path = tiny_models.write_glm4_moe(tmp_path / "model", num_nextn_predict_layers=1)
    _, draft = tensors_on_disk(path)
    assert {name.split(".")[2] for name in draft} == {"4"}
    assert draft["model.layers.4.eh_proj.weight"] == (48, 96)
    assert draft["model.layers.4.mlp.experts.3.down_proj.weight"] == (48, 24)
    assert draft["model.layers.4.shared_head.norm.weight"] == draft["model.layers.4.enorm.weight"] == (48,)


class World:
    """Two pipeline stages of two layers, tensor-parallel size 2 and two groups of experts: eight places, each with the
    tensors that belong there."""

    def __init__(self, path: Path) -> None:
        self.model: HFModel = read_hf_model(path)
        self.parallel = ParallelConfig(tp=2, pp=2, ep=2, world_size=4, sequence_parallel=True)
        self.config = transformer_config(self.model, ModelConfig(path=path), self.parallel)
        self.on_disk = tensors_on_disk(path)
        self.holdings = Holdings(self.model, self.config)
        self.held = {
            (pp, rank): {name: shape for name, shape in self._tensors(rank, rank) if self._stage(name) == pp}
            for pp in range(2)
            for rank in range(2)
        }

    def _stage(self, name: str) -> int:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) // 2
        return 0 if name.startswith("embedding") else 1

    def _tensors(self, tp: int, ep: int) -> list[tuple[str, tuple[int, ...]]]:
        out = []
        for entry in self.holdings.table.values():
            full = [torch.empty(self.on_disk[0][name], device="meta") for name in entry.hf]
            if entry.kind == "vocab":
                full = [torch.empty(24, full[0].shape[1], device="meta")]  # 23 words and one row of padding
            if not entry.expert:
                out.append((entry.name, tuple(shard(entry.kind, full, self.config, tp, 2).shape)))
            elif int(entry.name.split("local_experts.")[1].split(".")[0]) // 2 == ep:
                out.append((entry.name, tuple(shard(entry.kind, full, self.config, 0, 1).shape)))
        return out

    def coverage(self) -> Coverage:
        for (pp, rank), tensors in self.held.items():
            place = Place(rank=2 * pp + rank, tp=rank, pp=pp, ep=rank, etp=0, dp=0, edp=0)
            self.holdings.add(place, tensors.items())
        return coverage(self.holdings, self.model, self.config, self.parallel, self.on_disk)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tiny_models.write_glm4_moe(tmp_path / "model", num_nextn_predict_layers=1))


def test_ranks_that_hold_everything_once_cover_the_checkpoint_and_carry_the_draft_layer(world: World) -> None:
    found = world.coverage()
    assert found.exact, found
    assert (found.tensors, found.carried) == (len(world.on_disk[0]), len(world.on_disk[1]))


def test_a_parameter_that_one_tensor_parallel_rank_lacks_is_missing(world: World) -> None:
    del world.held[0, 1]["decoder.layers.1.self_attention.linear_proj.weight"]
    found = world.coverage()
    assert (found.missing, found.duplicate, found.unexpected) == (["model.layers.1.self_attn.o_proj.weight"], [], [])


def test_an_expert_that_nobody_holds_is_missing(world: World) -> None:
    del world.held[1, 1][EXPERT]
    assert world.coverage().missing == EXPERT_ON_DISK


def test_an_expert_in_two_groups_is_there_twice(world: World) -> None:
    world.held[1, 0][EXPERT] = world.held[1, 1][EXPERT]
    found = world.coverage()
    assert (found.missing, found.duplicate) == ([], EXPERT_ON_DISK)


def test_a_layer_in_two_pipeline_stages_is_there_twice(world: World) -> None:
    name = "decoder.layers.1.pre_mlp_layernorm.weight"
    for rank in range(2):
        world.held[1, rank][name] = world.held[0, rank][name]
    assert world.coverage().duplicate == ["model.layers.1.post_attention_layernorm.weight"]


def test_an_untied_head_under_the_embeddings_name_is_there_twice_and_missing(world: World) -> None:
    for rank in range(2):
        world.held[1, rank]["embedding.word_embeddings.weight"] = world.held[1, rank].pop("output_layer.weight")
    found = world.coverage()
    assert (found.missing, found.duplicate) == (["lm_head.weight"], ["model.embed_tokens.weight"])


def test_a_shape_that_no_checkpoint_has_is_told_with_the_one_on_disk(world: World) -> None:
    for rank in range(2):
        world.held[0, rank]["decoder.layers.0.mlp.linear_fc2.weight"] = (48, 44)
    assert world.coverage().unexpected == ["model.layers.0.mlp.down_proj.weight [48, 88], on disk [48, 80]"]


def test_a_parameter_that_no_tensor_fills_is_told_by_its_name(world: World) -> None:
    world.held[1, 0]["decoder.layers.3.mlp.extra.weight"] = (3,)
    assert world.coverage().unexpected == ["Megatron's decoder.layers.3.mlp.extra.weight"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ([3], "3"),
        ([*range(32)], "0–31"),
        ([*range(0, 32, 4)], "0, 4 … 28"),
        ([rank for rank in range(32) if rank % 4], "1–3, 5–7 … 29–31"),
        ([0, 1, 5], "0–1, 5"),
        ([0, 2, 5, 7], "0, 2, 5, 7"),
    ],
)
def test_ranks_in_one_column_are_named_shortly(ranks: list[int], names: str) -> None:
    assert names_of(ranks) == names
