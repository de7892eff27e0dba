"""A GPTModel under Megatron's data parallelism with its optimizer: what policy and critic have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import OptimizerConfig, ParallelConfig
from megatron_sao.models.dsa import freeze_indexers
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.offload import HostCopy
from megatron_sao.weights.load import AWAY

Stats = dict[str, torch.Tensor]
# What a loss function returns to Megatron's schedule: summed loss, denominator of this micro-batch, statistics.
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Stats]]
ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, LossFunction]]


class Trainable:
    """Model chunks of this rank, their gradient buffers, optimizer and learning-rate schedule.

    Args:
        chunks: bare models, one per virtual pipeline stage. Parameters without ``requires_grad`` get neither gradient
            buffer nor optimizer state; the indexers of sparse attention never do.
        config: their Megatron config; the schedule's hooks are set on it, so it must not be shared.
        optimizer: which one, its settings and the learning rate's.
        total_steps: optimizer steps of the stage, over which the learning rate decays.
        parallel: whether to split the optimizer's state over data-parallel ranks, and what waits in host memory.

    Where the idle model waits there, its weights are at hand until the first :meth:`offload` and inside
    :meth:`resident`, its gradient buffers in :meth:`train_step` alone.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        config: TransformerConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        parallel: ParallelConfig,
    ) -> None:
        self._chunks, self.config = chunks, config
        freeze_indexers(chunks)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.bf16, use_distributed_optimizer=parallel.distributed_optimizer
        )
        wrapped = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()  # Float16Module rounds the buffer, and routing with it
        for chunk in chunks:
            if config.recompute_granularity == "full" and chunk.pre_process:
                # Of a recomputed layer autograd sees the input alone: where the embedding is frozen that would need no
                # gradient, and every weight behind it would silently get none.
                chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
        self._modules = [DistributedDataParallel(config, ddp, chunk) for chunk in wrapped]
        self._settings, self._parallel, self._total_steps = optimizer, parallel, total_steps
        self.optimizer = self._new_optimizer()
        self.scheduler = self._new_scheduler()
        self.device = next(chunks[0].parameters()).device
        self._host: HostCopy | None = None
        if parallel.offload_idle_model:
            self._host = HostCopy(p for chunk in chunks for p in chunk.parameters())
            self._drop_gradients()
        self._users = 1  # of the weights: who fills them
        config.finalize_model_grads_func = finalize_model_grads

    @property
    def chunks(self) -> list[GPTModel]:
        self._check_resident()
        return self._chunks

    @property
    def modules(self) -> list[DistributedDataParallel]:
        self._check_resident()
        return self._modules

    @contextmanager
    def resident(self, gradients: bool = False) -> Iterator[None]:
        """Have the weights at hand, with ``gradients`` their buffers too, zeroed. Inside another it changes nothing."""
        self._users += 1
        if self._host is not None:
            self._host.come_back()
            if gradients:
                for module in self._modules:
                    module.restore_grad_buffers(synchronize=self._on_gpu)
        try:
            yield
        finally:
            if self._host is not None and gradients:
                self._drop_gradients()
            self._leave()

    def offload(self) -> None:
        """Let go, once the model is filled, of what the config has wait in host memory."""
        self.offload_optimizer()
        self._leave()

    def offload_optimizer(self) -> None:
        """Let go of the optimizer's state alone, where the config has it wait in host memory until its next step."""
        if self._parallel.offload_optimizer:
            self.optimizer.offload_to_cpu()

    def _leave(self) -> None:
        self._users -= 1
        if self._host is not None and self._users == 0:
            self._host.leave()

    def _drop_gradients(self) -> None:
        for module in self._modules:
            module.offload_grad_buffers(synchronize=self._on_gpu, empty_cache=self._on_gpu)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _check_resident(self) -> None:
        if self._host is not None and self._host.away:
            raise RuntimeError(AWAY)

    def reset_optimizer(self) -> None:
        """Forget Adam's moments and step count, in place: fp32 main weights and schedule stay as they are."""
        for optimizer in self.optimizer.chained_optimizers:
            for state in optimizer.optimizer.state.values():
                for value in state.values():
                    value.zero_()
            for group in optimizer.optimizer.param_groups:
                group["step"] = 0

    def reload_main_parameters(self) -> None:
        """Take over weights that were written into the model after the optimizer was built (its fp32 main copies)."""
        self.optimizer.reload_model_params()

    def _new_optimizer(self) -> MegatronOptimizer:
        s = self._settings
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer=s.name,
                sgd_momentum=0.0,
                lr=s.lr,
                min_lr=s.lr * s.min_lr_ratio,
                adam_beta1=s.beta1,
                adam_beta2=s.beta2,
                adam_eps=s.eps,
                weight_decay=s.weight_decay,
                clip_grad=s.clip_grad or math.inf,  # at 0 Megatron would not look at the norm at all
                bf16=self.config.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=self._parallel.distributed_optimizer,
            ),
            self._modules,
        )
        self.config.grad_scale_func = optimizer.scale_loss
        return optimizer

    def _new_scheduler(self) -> OptimizerParamScheduler:
        s = self._settings
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=s.lr,
            min_lr=s.lr * s.min_lr_ratio,
            lr_warmup_steps=s.warmup_steps,
            lr_decay_steps=max(self._total_steps, s.warmup_steps + 1),
            lr_decay_style=s.decay,
            start_wd=s.weight_decay,
            end_wd=s.weight_decay,
            wd_incr_steps=max(self._total_steps, 1),
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,  # a checkpoint of another schedule is refused, not obeyed
        )

    def forward(self, microbatches: list[MicroBatch], forward_step: ForwardStep) -> list[Stats]:
        """Evaluate without gradients. Returns each micro-batch's statistics on the last pipeline stage, else []."""
        with self.resident(), torch.no_grad():
            return self._run(microbatches, forward_step, forward_only=True)

    def train_step(
        self, microbatches: list[MicroBatch], forward_step: ForwardStep, keys: list[str]
    ) -> dict[str, float]:
        """One optimizer step, or none where the batch's denominator is 0: a zero gradient would still move Adam's
        weights.

        Args:
            keys: the statistics that the loss function returns, ``denominator`` among them.

        Returns:
            Those of the global batch, reduced by :func:`reduce_stats`, and ``grad_norm`` (0 without a step).

        Raises:
            FloatingPointError: the gradient is not finite; the weights must not be used any more.
        """
        with self.resident(gradients=True):
            return self._train_step(microbatches, forward_step, keys)

    def _train_step(
        self, microbatches: list[MicroBatch], forward_step: ForwardStep, keys: list[str]
    ) -> dict[str, float]:
        for module in self.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        stats = reduce_stats(self._run(microbatches, forward_step, forward_only=False), keys, self.device)
        self.scheduler.step(1)
        if stats["denominator"] == 0:
            return stats | {"grad_norm": 0.0}
        if self._parallel.offload_optimizer:
            self.optimizer.restore_from_cpu()
        successful, grad_norm, _ = self.optimizer.step()
        self.offload_optimizer()
        grad_norm = 0.0 if grad_norm is None else float(grad_norm)
        if not successful or not grad_norm < float("inf"):
            raise FloatingPointError(
                f"the gradient norm is {grad_norm}; training ends, and starts again from the newest checkpoint: "
                "lower the learning rate or look at the batch"
            )
        return stats | {"grad_norm": grad_norm}

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _run(self, microbatches: list[MicroBatch], forward_step: ForwardStep, forward_only: bool) -> list[Stats]:
        iterators = [iter(microbatches) for _ in self.modules]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.modules if len(self.modules) > 1 else self.modules[0],
            num_microbatches=len(microbatches),
            seq_length=max(m.num_tokens for m in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
        )


def reduce_stats(per_microbatch: list[Stats], keys: list[str], device: torch.device) -> dict[str, float]:
    """Statistics of the global batch on every rank: sums over micro-batches and data-parallel ranks, and over nothing
    else. A key that ends with ``_max`` is a maximum instead. Collective.

    Args:
        per_microbatch: 0-d statistics of this rank; empty except on the last pipeline stage.
        keys: the statistics' names, since only the last stage has them.
    """

    def column(key: str) -> torch.Tensor:
        values = [stats[key].detach().double() for stats in per_microbatch]
        if not values:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(values).max() if key.endswith("_max") else torch.stack(values).sum()

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    out: dict[str, float] = {}
    for operation, names in (
        (dist.ReduceOp.SUM, [k for k in keys if not k.endswith("_max")]),
        (dist.ReduceOp.MAX, [k for k in keys if k.endswith("_max")]),
    ):
        if not names:
            continue
        row = torch.stack([column(key) for key in names]).to(device)
        dist.all_reduce(row, operation, group=group)
        dist.broadcast(
            row,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        out |= dict(zip(names, row.tolist(), strict=True))
    return out


def forward_kwargs(batch: MicroBatch) -> dict[str, Any]:
    """The arguments of GPTModel.forward for a packed micro-batch."""
    return {
        "input_ids": batch.tokens,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "packed_seq_params": batch.packed_seq_params,
    }
