"""Adam for machines with neither Transformer Engine nor apex.

Megatron then falls back on ``torch.optim``, whose Adam counts steps per parameter. Its distributed optimizer can save
that but not load it: it expects one count per parameter group, as the fused Adam of the two packages keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Adam(torch.optim.Optimizer):
    """The interface of Transformer Engine's FusedAdam with the arithmetic of torch's AdamW, operation by operation.

    ``step`` is kept in the parameter groups; the state of a parameter is ``exp_avg`` and ``exp_avg_sq``, of its shape
    and dtype.

    Args:
        adam_w_mode: decoupled weight decay; the other kind is refused.
        capturable: accepted for the interface, and refused when set: the step count is a Python integer.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable or not adam_w_mode:
            raise ValueError(
                f"capturable={capturable}, adam_w_mode={adam_w_mode}: without Transformer Engine there is only eager "
                "Adam with decoupled weight decay"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        gradients = [p.grad for p in params]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, -lr / (1 - beta1 ** group["step"]))


def bind_adam() -> None:
    """Make :class:`Adam` Megatron's fused Adam if it has found none. Before any optimizer is built."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
