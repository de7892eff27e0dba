"""What the losses must not depend on: how the batch is split, ordered and padded, and what lies off the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_sao.algorithm import dis_policy_loss, ppo_clip_policy_loss, value_loss
from tests.reference import f64

Trajectory = dict[str, Tensor]  # columns [L]: loss_mask, parameter and what the loss compares it with

LOSSES: dict[str, Callable[[Trajectory], tuple[Tensor, dict[str, Tensor]]]] = {
    "dis": lambda t: dis_policy_loss(t["parameter"], t["other"], t["advantages"], t["loss_mask"], 0.3, 2.0),
    "ppo_clip": lambda t: ppo_clip_policy_loss(t["parameter"], t["other"], t["advantages"], t["loss_mask"], 0.2, 0.28),
    "value": lambda t: value_loss(t["parameter"], t["advantages"], t["loss_mask"]),
    "value_clip": lambda t: value_loss(t["parameter"], t["advantages"], t["loss_mask"], t["old_values"], 0.2),
}


def make_trajectory(seed: int, turns: int, action: int = 3, observation: int = 2) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)
    loss_mask = torch.tensor([0] * 4 + ([1] * action + [0] * observation) * turns, dtype=torch.uint8)
    parameter, noise, advantages = torch.randn(3, loss_mask.numel(), generator=generator)  # float32 numbers
    other, old_values = parameter + 0.3 * noise, parameter - 0.3 * noise
    columns = {"parameter": parameter, "other": other, "advantages": advantages, "old_values": old_values}
    return {"loss_mask": loss_mask, **{name: column.double() for name, column in columns.items()}}


def make_batch(value: bool) -> list[Trajectory]:
    """Every kind of trajectory a batch may hold."""
    batch = [make_trajectory(seed, turns) for seed, turns in enumerate((1, 300, 5, 2))]
    batch.append(make_trajectory(10, turns=0))  # no action at all
    batch.append({name: column[4:5] for name, column in make_trajectory(11, turns=1).items()})  # one token
    rejected = make_trajectory(12, turns=3)
    rejected["other"] = rejected["parameter"] + torch.where(torch.arange(19) % 2 == 0, 4.0, -4.0)
    batch.append(rejected)
    if not value:
        broken = make_trajectory(13, turns=4)
        broken["other"][[4, 5, 9, 14]] = torch.tensor([-math.inf, math.nan, math.inf, -math.inf], dtype=f64)
        batch.append(broken)
    return batch


def evaluate(loss: Callable, batch: list[Trajectory], dtype: torch.dtype) -> tuple[Tensor, list[Tensor], dict]:
    """Loss sum, gradient per trajectory, and statistics of one packed part."""
    packed = {name: torch.cat([t[name] for t in batch]) for name in batch[0]}
    packed = {name: column.to(dtype) if column.dtype == f64 else column for name, column in packed.items()}
    packed["parameter"].requires_grad_()
    loss_sum, stats = loss(packed)
    loss_sum.backward()
    gradients = packed["parameter"].grad.split([t["loss_mask"].numel() for t in batch])
    return loss_sum.detach(), list(gradients), stats


def with_junk(trajectory: Trajectory, padding: int, junk: float) -> Trajectory:
    """The trajectory padded, with ``junk`` in every position off the mask."""
    length = trajectory["loss_mask"].numel()
    padded = {name: torch.cat([column, column.new_zeros(padding)]) for name, column in trajectory.items()}
    mask = padded["loss_mask"]
    assert int(mask[length:].sum()) == 0
    junked = {name: torch.where(mask != 0, column, junk) for name, column in padded.items() if name != "loss_mask"}
    return {"loss_mask": mask, **junked}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@given(data=st.data())
@settings(max_examples=15)
def test_loss_gradient_and_statistics_do_not_depend_on_splits_order_padding_or_junk(
    name: str, dtype: torch.dtype, tolerance: float, data: st.DataObject
) -> None:
    loss, batch = LOSSES[name], make_batch(value=name.startswith("value"))
    expected_loss, expected_gradients, expected_stats = evaluate(loss, batch, dtype)
    num_tokens = int(expected_stats["num_action_tokens"])

    order = data.draw(st.permutations(range(len(batch))))
    padding = data.draw(st.lists(st.integers(0, 20), min_size=len(batch), max_size=len(batch)))
    junk = data.draw(st.sampled_from([0.5, -1e30, 1e300, math.nan, math.inf, -math.inf]))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(batch) - 1)))), len(batch)]
    dirty = {k: with_junk(batch[k], padding[k], junk) for k in order}

    total, gradients, totals = torch.zeros((), dtype=dtype), {}, dict.fromkeys(expected_stats, 0.0)
    for start, stop in pairwise(cuts):
        part = order[start:stop]
        part_loss, part_gradients, part_stats = evaluate(loss, [dirty[k] for k in part], dtype)
        total += part_loss
        gradients.update(zip(part, part_gradients, strict=True))
        for key, value in part_stats.items():
            totals[key] = max(totals[key], float(value)) if key.endswith("_max") else totals[key] + float(value)

    # per action token, as the trainer uses it: a sum of n terms in another order is off by more than one term is
    assert float(total) / num_tokens == pytest.approx(float(expected_loss) / num_tokens, rel=tolerance, abs=tolerance)
    for k, expected in enumerate(expected_gradients):
        length = expected.numel()
        torch.testing.assert_close(gradients[k][:length], expected, rtol=tolerance, atol=tolerance)
        off_mask = dirty[k]["loss_mask"] == 0
        assert torch.equal(gradients[k][off_mask], torch.zeros_like(gradients[k][off_mask]))
    for key, value in expected_stats.items():
        exact = not value.dtype.is_floating_point
        assert totals[key] == (float(value) if exact else pytest.approx(float(value), rel=tolerance)), key


def test_the_batch_of_the_invariance_test_reaches_every_branch() -> None:
    _, gradients, stats = evaluate(LOSSES["dis"], make_batch(value=False), f64)
    assert all(int(stats[name]) > 3 for name in ("accepted", "below", "above", "nonfinite"))
    assert torch.equal(gradients[6], torch.zeros_like(gradients[6])), "every token rejected"
    assert float(gradients[5].abs().sum()) > 0, "the one-token trajectory counts"
    assert int(evaluate(LOSSES["ppo_clip"], make_batch(value=False), f64)[2]["clipped"]) > 50
    assert int(evaluate(LOSSES["value_clip"], make_batch(value=True), f64)[2]["clipped"]) > 50


@pytest.mark.parametrize("name", LOSSES)
def test_float32_agrees_with_float64(name: str) -> None:
    batch = make_batch(value=name.startswith("value"))
    loss, gradients, stats = evaluate(LOSSES[name], batch, torch.float32)
    expected_loss, expected_gradients, expected_stats = evaluate(LOSSES[name], batch, f64)
    num_tokens = int(stats["num_action_tokens"])
    assert float(loss) / num_tokens == pytest.approx(float(expected_loss) / num_tokens, abs=1e-6)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    assert {k: float(v) for k, v in stats.items()} == pytest.approx(
        {k: float(v) for k, v in expected_stats.items()}, rel=1e-6
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_part_without_action_tokens_has_loss_and_gradient_zero(name: str) -> None:
    for trajectory in (make_trajectory(0, turns=0), {k: v[:0] for k, v in make_trajectory(0, turns=1).items()}):
        loss, (gradient,), stats = evaluate(LOSSES[name], [with_junk(trajectory, 0, math.nan)], torch.float32)
        assert float(loss) == 0 and torch.equal(gradient, torch.zeros_like(gradient))
        assert all(float(value) == 0 for value in stats.values())
