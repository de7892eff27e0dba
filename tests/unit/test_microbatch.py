"""Alignment of packed batches: what each predicting position is told about the token after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_sao.trainer.microbatch import build_microbatches
from megatron_sao.trainer.rollout_metrics import rollout_metrics, staleness, success
from megatron_sao.trainer.source import permute_rewards
from tests.trajectories import make_trajectory

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


def test_every_array_is_shifted_to_the_position_that_predicts_the_token() -> None:
    trajectory = make_trajectory()  # tokens 1..6, actions at 2, 3 and 5
    (batch,) = build_microbatches([trajectory, trajectory], 0, 1, 100, 1, CPU)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5] * 2]
    assert batch.labels[0, :5].tolist() == [2, 3, 4, 5, 6]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False] * 2
    assert batch.rollout_logprobs[batch.loss_mask].tolist() == [-0.5, -1.0, -0.25] * 2
    assert batch.rewards.tolist() == [0, 0, 0, 0, 1, 0] * 2
    assert batch.cu_seqlens.tolist() == [0, 6, 12]


def test_the_first_token_of_a_trajectory_is_never_predicted_by_the_one_packed_before_it() -> None:
    masked = make_trajectory(loss_mask=np.array([1, 0, 1, 1, 0, 1], np.uint8))  # refused at the buffer's door
    (batch,) = build_microbatches([make_trajectory(), masked], 0, 1, 100, 1, CPU)
    assert not batch.loss_mask[5]


def test_padding_is_a_masked_sequence_of_its_own_and_a_rank_without_work_gets_a_dummy() -> None:
    per_rank = [build_microbatches([make_trajectory()], rank, 2, 100, 4, CPU) for rank in range(2)]
    busy, idle = sorted((batches[0] for batches in per_rank), key=lambda b: -len(b.trajectories))
    assert busy.num_tokens == 8
    assert busy.cu_seqlens.tolist() == [0, 6, 8]
    assert busy.spans() == [(0, 6)]
    assert busy.num_action_tokens == 3
    assert idle.num_tokens == 4
    assert idle.num_action_tokens == 0
    assert idle.spans() == []


def test_a_pack_is_split_over_context_ranks_after_every_position_was_told_of_its_next_token() -> None:
    batch = [make_trajectory(), make_trajectory(token_ids=np.array([7, 8, 9, 10, 11, 12], np.int32))]
    shards = [build_microbatches(batch, 0, 1, 100, 3, CPU, 1, rank, 2)[0] for rank in range(2)]
    # six tokens become eight, in chunks of two; the padding of 24 to a multiple of 2 x 3 and of 4 adds a sequence
    assert [shard.cu_seqlens.tolist() for shard in shards] == [[0, 8, 16, 24]] * 2
    assert [shard.spans() for shard in shards] == [[(0, 6), (8, 14)]] * 2
    assert [shard.num_tokens for shard in shards] == [12, 12]
    assert [shard.tokens[0, :8].tolist() for shard in shards] == [[1, 2, 0, 0, 7, 8, 0, 0], [3, 4, 5, 6, 9, 10, 11, 12]]
    assert [shard.labels[0, :4].tolist() for shard in shards] == [[2, 3, 0, 0], [4, 5, 6, 0]]
    assert [shard.position_ids[0, :4].tolist() for shard in shards] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [shard.num_action_tokens for shard in shards] == [2, 4]
    assert [shard.sampled_under(["1.1"]).nonzero().flatten().tolist() for shard in shards] == [[], [2, 6]]
    assert [shard.num_trajectories for shard in shards] == [2, 0]


def test_padding_for_context_ranks_counts_towards_the_bound_of_a_micro_batch() -> None:
    assert len(build_microbatches([make_trajectory()] * 2, 0, 1, 12, 1, CPU)) == 1
    assert len(build_microbatches([make_trajectory()] * 2, 0, 1, 12, 1, CPU, 1, 0, 2)) == 2


def test_tokens_of_one_version_are_found_at_their_predicting_positions() -> None:
    (batch,) = build_microbatches([make_trajectory()], 0, 1, 100, 1, CPU)  # 1.0 on tokens 2, 3 and 1.1 on token 5
    assert batch.sampled_under(["1.0"]).nonzero().flatten().tolist() == [1, 2]
    assert batch.sampled_under(["1.1"]).nonzero().flatten().tolist() == [4]
    assert not batch.sampled_under(["2.0"]).any()


def test_permuted_rewards_keep_their_sum_and_move_between_trajectories() -> None:
    batch = [make_trajectory(id=str(i), rewards=np.array([0, 0, 0, 0, 0, i], np.float32)) for i in range(1, 30)]
    permuted = permute_rewards(batch, seed=0)
    assert sorted(t.total_reward for t in permuted) == [t.total_reward for t in batch]
    assert sum(a.total_reward == b.total_reward for a, b in zip(batch, permuted, strict=True)) < 10
    assert [t.total_reward for t in permute_rewards(batch, seed=0)] == [t.total_reward for t in permuted]


def test_permuting_rewards_leaves_trajectories_without_an_action_alone() -> None:
    none = np.zeros(6, np.float32)
    silent = make_trajectory(id="silent", loss_mask=none.astype(np.uint8), logprobs=none, rewards=none, failure="fell")
    acting = [make_trajectory(id=str(i), rewards=np.array([0, 0, 0, 0, 0, i], np.float32)) for i in range(1, 9)]
    permuted = permute_rewards([*acting[:4], silent, *acting[4:]], seed=0)
    assert permuted[4] is silent
    assert [t.id for t in permuted] == ["1", "2", "3", "4", "silent", "5", "6", "7", "8"]
    assert sorted(t.total_reward for t in permuted) == list(range(9))
    assert permute_rewards([silent], seed=0) == [silent]


def test_staleness_counts_from_the_oldest_action_token() -> None:
    trajectory = make_trajectory()  # versions 1.0 and 1.1
    assert staleness(trajectory, 3) == 3
    metrics = rollout_metrics([trajectory, make_trajectory(versions=[("1.2", 0, 6)])], 3, seconds=2.0)
    assert metrics["staleness/max"] == 3
    assert metrics["staleness/mean"] == 2
    assert metrics["version/spans_max"] == 2
    assert metrics["tokens_per_second"] == 6
    assert metrics["env/calls"] == 2


def test_success_is_the_environments_own_word_or_a_full_reward() -> None:
    half = np.array([0, 0, 0, 0, 0, 0.5], np.float32)
    assert success(make_trajectory()) == 1
    assert success(make_trajectory(rewards=half)) == 0
    assert success(make_trajectory(rewards=half, metrics={"success": 1.0})) == 1
