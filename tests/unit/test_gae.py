"""Skip-observation GAE against the printed recursion, written out here token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sao.algorithm import batched_skip_observation_gae, length_adaptive_lambda, skip_observation_gae
from tests.reference import EDGE, close, f64, tensor


def test_two_actions_computed_by_hand() -> None:
    case = EDGE["hand-two-actions"]
    advantages, returns = skip_observation_gae(
        tensor(case["rewards"]), tensor(case["values"]), torch.tensor(case["loss_mask"]), case["gamma"], case["lam"]
    )
    close(advantages, case["expect"]["advantages"])
    close(returns, case["expect"]["returns"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_long_horizon_keeps_its_precision(dtype: torch.dtype) -> None:
    case, plan = EDGE["long-horizon"], EDGE["long-horizon"]["generate"]
    turn = [1] * plan["action"] + [0] * plan["observation"]
    mask = torch.tensor([0] * plan["prompt"] + turn * plan["turns"])
    values = (0.3 * torch.sin(0.01 * torch.arange(len(mask), dtype=f64))).to(dtype)
    actions = mask.nonzero().squeeze(1)
    rewards = torch.zeros(len(mask), dtype=dtype)
    rewards[actions[-1]] = plan["terminal_reward"]
    lam = length_adaptive_lambda(len(actions), case["alpha"])
    advantages, _ = skip_observation_gae(rewards, values, mask, case["gamma"], lam)
    expect, tolerance = case["expect"], 1e-11 if dtype == f64 else 1e-5
    assert len(actions) == expect["num_action_tokens"] and lam == pytest.approx(expect["lambda_policy"], abs=1e-15)
    assert float(advantages[actions[0]]) == pytest.approx(expect["first_advantage"], rel=tolerance)
    assert float(advantages[actions[4000]]) == pytest.approx(expect["middle_advantage"], rel=tolerance)
    assert float(advantages[actions[-1]]) == pytest.approx(expect["last_advantage"], rel=tolerance)
    assert float(advantages.double().sum()) == pytest.approx(expect["sum_advantages"], rel=tolerance)


def plain_gae(rewards: list, values: list, mask: list, gamma: float, lam: float, bootstrap: float) -> tuple:
    """The recursion as it is printed in the paper, token by token."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    advantage, target, next_value = 0.0, bootstrap, bootstrap
    for i in reversed(range(len(mask))):
        if mask[i]:
            advantage = rewards[i] + gamma * next_value - values[i] + gamma * lam * advantage
            target = rewards[i] + gamma * target
            next_value = values[i]
            advantages[i], returns[i] = advantage, target
    return advantages, returns


numbers = st.floats(-3, 3, allow_nan=False, width=32)
tokens = st.lists(st.tuples(st.booleans(), numbers, numbers), min_size=0, max_size=70)
trajectories = st.lists(st.tuples(tokens, st.floats(0, 1), numbers), min_size=1, max_size=5)


@given(trajectories, st.sampled_from([1.0, 0.99, 0.5, 0.0]))
@settings(max_examples=60)
def test_batched_gae_equals_the_plain_recursion(batch: list, gamma: float) -> None:
    flat = [token for trajectory, _, _ in batch for token in trajectory]
    mask = [token[0] for token in flat]
    values = tensor([v if m else math.nan for m, v, _ in flat])
    rewards = tensor([r if m else math.inf for m, _, r in flat])
    cu_seqlens = torch.tensor([0] + [len(trajectory) for trajectory, _, _ in batch]).cumsum(0).int()
    actual = batched_skip_observation_gae(
        rewards,
        values,
        torch.tensor(mask, dtype=torch.uint8),
        cu_seqlens,
        gamma,
        tensor([lam for _, lam, _ in batch]),
        tensor([bootstrap for _, _, bootstrap in batch]),
    )
    expected: tuple[list, list] = ([], [])
    for trajectory, lam, bootstrap in batch:
        columns = [list(column) for column in zip(*trajectory, strict=True)] or [[], [], []]
        plain = plain_gae(columns[2], columns[1], columns[0], gamma, lam, bootstrap)
        for total, part in zip(expected, plain, strict=True):
            total.extend(part)
    close(actual[0], expected[0])
    close(actual[1], expected[1])


def random_batch(lengths: list[int], dtype: torch.dtype = f64) -> dict[str, torch.Tensor]:
    """A packed batch of those lengths, half actions, the second trajectory without any; junk off the mask."""
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    loss_mask = torch.rand(total, generator=generator) < 0.5
    if len(lengths) > 1:
        loss_mask[lengths[0] : lengths[0] + lengths[1]] = False
    rewards, values = torch.randn(2, total, generator=generator, dtype=f64)
    return {
        "rewards": torch.where(loss_mask, rewards, math.nan).to(dtype),
        "values": torch.where(loss_mask, values, -math.inf).to(dtype),
        "loss_mask": loss_mask,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "lam": torch.rand(len(lengths), generator=generator, dtype=f64),
        "bootstrap_values": torch.randn(len(lengths), generator=generator, dtype=f64),
    }


@pytest.mark.parametrize("gamma", [1.0, 0.999, 0.0])
def test_a_trajectory_longer_than_a_cache_block_equals_the_plain_recursion(gamma: float) -> None:
    length = 70_001
    batch = random_batch([length])
    batch["loss_mask"][20_000:60_000] = False  # no action in a whole block
    batch["lam"][0] = length_adaptive_lambda(length)
    actual = batched_skip_observation_gae(gamma=gamma, **batch)
    columns = (batch[name].tolist() for name in ("rewards", "values", "loss_mask"))
    expected = plain_gae(*columns, gamma, float(batch["lam"]), float(batch["bootstrap_values"]))
    close(actual[0], expected[0])
    close(actual[1], expected[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@given(order=st.permutations(range(5)), padding=st.lists(st.integers(0, 40), min_size=5, max_size=5))
@settings(max_examples=20)
def test_a_trajectory_does_not_depend_on_its_place_its_neighbours_or_padding(
    dtype: torch.dtype, tolerance: float, order: list[int], padding: list[int]
) -> None:
    lengths = [300, 7, 1, 64, 2]
    batch = random_batch(lengths, dtype)
    reference = batched_skip_observation_gae(gamma=0.97, **batch)

    def rearrange(packed: torch.Tensor, fill: float) -> torch.Tensor:
        parts = packed.split(lengths)
        return torch.cat([part for k in order for part in (parts[k], torch.full((padding[k],), fill).to(packed))])

    actual = batched_skip_observation_gae(
        rearrange(batch["rewards"], math.inf),
        rearrange(batch["values"], math.nan),
        rearrange(batch["loss_mask"], 0),
        torch.tensor([0] + [lengths[k] + padding[k] for k in order]).cumsum(0),
        0.97,
        batch["lam"][order],
        batch["bootstrap_values"][order],
    )
    for result, expected in zip(actual, reference, strict=True):
        close(result, rearrange(expected, 0.0), tolerance)


def test_a_batch_without_trajectories_or_without_actions_gives_zeros() -> None:
    empty = torch.zeros(0, dtype=f64)
    nothing = batched_skip_observation_gae(empty, empty, empty, torch.tensor([0]), 1.0, empty, empty)
    assert [result.shape for result in nothing] == [(0,), (0,)]
    junk, mask = torch.full((3,), math.nan), torch.zeros(3, dtype=torch.uint8)
    cu_seqlens = torch.tensor([0, 0, 2, 3, 3])  # empty trajectories too
    for result in batched_skip_observation_gae(junk, junk, mask, cu_seqlens, 1.0, torch.ones(4), torch.ones(4)):
        assert torch.equal(result, torch.zeros(3))


def test_a_discounted_reward_survives_a_long_horizon() -> None:
    length, gamma = 100_000, 0.999  # gamma^length is 3e-44, below float32 and a division by it would be noise
    ones, rewards = torch.ones(length, dtype=f64), torch.ones(length, dtype=f64)
    _, returns = skip_observation_gae(rewards, torch.zeros(length, dtype=f64), ones, gamma, 0.5)
    close(returns[[0, -1]], [(1 - gamma**length) / (1 - gamma), 1.0])
    rewards[:-1] = 0
    _, returns = skip_observation_gae(rewards, torch.zeros(length, dtype=f64), ones, gamma, 0.5)
    assert float(returns[0]) == pytest.approx(gamma ** (length - 1), rel=1e-9)


def test_inputs_are_left_alone_and_results_carry_no_gradient() -> None:
    values, rewards, mask = torch.ones(4, dtype=f64, requires_grad=True), torch.ones(4, dtype=f64), torch.ones(4)
    advantages, returns = skip_observation_gae(rewards, values, mask, 1.0, 0.5, bootstrap_value=3.0)
    assert not advantages.requires_grad and not returns.requires_grad
    assert torch.equal(rewards, torch.ones(4, dtype=f64)) and torch.equal(values.detach(), torch.ones(4, dtype=f64))


def test_results_are_at_least_float32() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (f64, f64)):
        ones = torch.ones(4, dtype=dtype)
        for result in skip_observation_gae(ones, ones, torch.ones(4), 1.0, 0.5):
            assert result.dtype == expected


@pytest.mark.parametrize("cu_seqlens", [[0, 2], [1, 3], [0, 4, 3], [0, 2, 1, 3]])
def test_cu_seqlens_that_do_not_span_the_tokens_are_refused(cu_seqlens: list[int]) -> None:
    per_trajectory = torch.ones(len(cu_seqlens) - 1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        batched_skip_observation_gae(
            torch.ones(3), torch.ones(3), torch.ones(3), torch.tensor(cu_seqlens), 1.0, per_trajectory, per_trajectory
        )


def test_lambda_stays_in_the_unit_interval() -> None:
    assert length_adaptive_lambda(8000) == pytest.approx(1 - 1 / 12000)
    assert length_adaptive_lambda(1, alpha=0.5) == 0.0
    assert length_adaptive_lambda(0) == 0.0
