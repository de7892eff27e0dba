"""Adam where neither Transformer Engine nor apex is installed."""

from __future__ import annotations

import pytest
import torch

from megatron_sao.models.adam import Adam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in [(5, 3), (7,), (2,)]]


def steps(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in params[:2]:  # the third never has a gradient
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def test_it_takes_the_steps_of_torchs_adamw() -> None:
    ours, theirs = parameters(), parameters()
    steps(Adam(ours, **SETTINGS), ours, 0, 5)
    steps(torch.optim.AdamW(theirs, **SETTINGS), theirs, 0, 5)
    for mine, expected, start in zip(ours, theirs, parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)
        assert torch.equal(mine, start) == (mine.numel() == 2)


def test_its_steps_are_counted_per_group_and_go_on_after_a_reload() -> None:
    whole, cut = parameters(), parameters()
    steps(Adam(whole, **SETTINGS), whole, 0, 5)
    first, second = Adam(cut, **SETTINGS), Adam(cut, **SETTINGS)
    steps(first, cut, 0, 3)
    saved = first.state_dict()
    assert saved["param_groups"][0]["step"] == 3
    assert all(state.keys() == {"exp_avg", "exp_avg_sq"} for state in saved["state"].values())
    second.load_state_dict(saved)
    steps(second, cut, 3, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="capturable=True, adam_w_mode=False"):
        Adam(parameters(), capturable=True, adam_w_mode=False)
