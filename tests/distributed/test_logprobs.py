"""Log-probabilities by blocks equal those of the whole softmax, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_sao.models.backend import Backend
from megatron_sao.trainer import logprobs
from megatron_sao.trainer.logprobs import linear_logprobs, linear_support_logprobs

pytestmark = pytest.mark.distributed

ROWS, HIDDEN, HEAD, VOCAB = 7, 5, 24, 21  # the head has three rows of padding
TEMPERATURE = 0.7


@pytest.fixture
def small_blocks(world: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ROWS", 3)
    monkeypatch.setattr(logprobs, "COLUMNS", 4)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(HEAD, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 3, 4, 8, 19, 20, 20])  # first and last of a block, and of the vocabulary
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64."""
    logprobs = (hidden.double() @ weight[:VOCAB].double().T / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], hidden: Tensor, weight: Tensor, entropy_coef: float) -> list[Tensor]:
    upstream = torch.linspace(-1, 2, ROWS, dtype=outputs[0].dtype)
    loss = (upstream * outputs[0]).sum()
    if entropy_coef:
        loss = loss + entropy_coef * (upstream.flip(0) * outputs[1]).sum()
    return list(torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_blocks_equal_the_whole_softmax(
    small_blocks: None, dtype: torch.dtype, tolerance: float, entropy_coef: float
) -> None:
    hidden, weight, labels = inputs(dtype)
    found = linear_logprobs(hidden, weight, labels, TEMPERATURE, VOCAB, entropy_grad=entropy_coef > 0)
    wanted = whole(hidden, weight, labels)
    assert found[0].dtype == dtype
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    found_grads = gradients(found, hidden, weight, entropy_coef)
    for a, b in zip(found_grads, gradients(wanted, hidden, weight, entropy_coef), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert not found_grads[1][VOCAB:].any()  # padding learns nothing


def test_large_logits_neither_overflow_nor_lose_the_small_ones(small_blocks: None) -> None:
    weight = torch.eye(VOCAB)[:, :VOCAB] * 200
    hidden = torch.eye(VOCAB)[:ROWS]  # row i has logit 200 at token i and 0 elsewhere
    values, entropy = linear_logprobs(hidden, weight, torch.arange(ROWS).roll(1), 1.0, VOCAB)
    assert values.tolist() == [-200.0] * ROWS
    assert entropy.tolist() == [0.0] * ROWS


@pytest.mark.parametrize("support", [False, True], ids=["vocabulary", "support"])
def test_bf16_weights_give_float32_logprobs_and_gradients_rounded_once(small_blocks: None, support: bool) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    if support:
        found = linear_support_logprobs(hidden, weight, labels, TEMPERATURE, torch.arange(VOCAB).expand(ROWS, VOCAB))
    else:
        found = linear_logprobs(hidden, weight, labels, TEMPERATURE, VOCAB)
    wanted = whole(hidden, weight, labels)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    pairs = zip(gradients(found, hidden, weight, 0.0), gradients(wanted, hidden, weight, 0.0), strict=True)
    for found_grad, wanted_grad in pairs:
        assert found_grad.dtype == torch.bfloat16
        # a block's gradient is rounded to the factors' precision before its products; their sum is not
        torch.testing.assert_close(found_grad.double(), wanted_grad.double(), rtol=2**-7, atol=2**-7)


def test_no_tokens_give_zero_gradients(small_blocks: None) -> None:
    hidden, weight, labels = inputs(torch.float32)
    values, _ = linear_logprobs(hidden[:0], weight, labels[:0], TEMPERATURE, VOCAB)
    values.sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_support_of_the_whole_vocabulary_changes_nothing(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = inputs(torch.float64)
    support = torch.arange(VOCAB).expand(ROWS, VOCAB)
    found = linear_support_logprobs(hidden, weight, labels, TEMPERATURE, support)
    wanted = whole(hidden, weight, labels)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(found, hidden, weight, 0.3), gradients(wanted, hidden, weight, 0.3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
