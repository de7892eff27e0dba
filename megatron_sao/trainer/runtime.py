"""The process's place in the training world: backend, process groups, seeds."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.models.backend import Backend, start_backend


def start_runtime(model: ModelConfig, parallel: ParallelConfig, seed: int, deterministic: bool) -> Backend:
    """Join the trainer's world and set up Megatron's process groups.

    Ranks come from the environment as torchrun sets it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); in a
    Slurm step that has WORLD_SIZE set the rank is the task's number. Without any this process is a world of one.

    Raises:
        ConfigError: the world that was started is not the one the config describes.
    """
    if "WORLD_SIZE" in os.environ and "SLURM_PROCID" in os.environ:
        os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
        os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = "0"  # whichever is free when it is opened: nobody else has to find it
    backend = start_backend(model.device, model.layers)
    dist.init_process_group(backend.distributed_backend, timeout=timedelta(seconds=parallel.collective_timeout))
    set_layout(parallel, seed)
    torch.use_deterministic_algorithms(deterministic)
    return backend


def set_layout(parallel: ParallelConfig, seed: int) -> None:
    """Divide the world into Megatron's groups, in place of the ones there may have been. Collective."""
    if dist.get_world_size() != parallel.world_size:
        raise ConfigError(
            f"{dist.get_world_size()} ranks were started, but parallel.world_size = {parallel.world_size}; "
            "start as many or set it"
        )
    _end_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=parallel.collective_timeout / 60,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _end_groups() -> None:
    """End what :func:`set_layout` made. Megatron forgets most of its groups without ending them, and with gloo each
    has three threads, of which one wakes a hundred times a second."""
    groups = parallel_state._global_process_group_list or [None]  # the first stands for the world
    if len(groups) > 1:
        dist.barrier()  # no rank still waits in one of them
    for group in groups[1:]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def stop_runtime() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
