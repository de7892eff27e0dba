"""Whether a model can be divided as a config says, before anything is built."""

from __future__ import annotations

from megatron_sao.config import ConfigError, RunConfig
from megatron_sao.models.hf import HFModel


def check_layout(config: RunConfig, model: HFModel) -> None:
    """Raise ConfigError with a sentence for everything that the layout divides and cannot."""
    parallel, raw = config.parallel, model.raw
    divided = {
        "tp": ("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        "ep": ("num_experts", "n_routed_experts"),
        "etp": ("moe_intermediate_size",),
    }
    problems = [
        f"{name} = {raw[name]} of {model.path / 'config.json'} is not a multiple of parallel.{size} = {count}; "
        f"choose a divisor of it"
        for size, names in divided.items()
        for name in names
        if (count := getattr(parallel, size)) > 1 and raw.get(name) and raw[name] % count
    ]
    if parallel.ep > 1 and not model.num_experts:
        problems.append(f"parallel.ep = {parallel.ep}, but {model.model_type} has no experts; set it to 1")
    if model.num_experts and parallel.tp > 1 and not parallel.sequence_parallel:
        problems.append(
            f"parallel.tp = {parallel.tp} with experts needs parallel.sequence_parallel = true; Megatron refuses it"
        )
    replicas = parallel.world_size // (parallel.tp * parallel.pp * parallel.cp)
    if replicas > config.rl.batch_size:
        problems.append(
            f"parallel.world_size = {parallel.world_size} leaves {replicas} data-parallel ranks, but rl.batch_size = "
            f"{config.rl.batch_size} trajectories: some would never have work; raise tp, pp, cp or the batch"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def describe_layout(config: RunConfig, model: HFModel) -> dict[str, int]:
    """Sizes that follow from the ones in the config."""
    p = config.parallel
    return {
        "ranks": p.world_size,
        "data parallel": p.world_size // (p.tp * p.pp * p.cp),
        "replicas of dense parameters": p.world_size // (p.tp * p.pp),
        "replicas of experts": p.world_size // (p.etp * p.ep * p.pp) if model.num_experts else 0,
        "experts per rank": model.num_experts // p.ep,
        "tokens per rank and micro-batch": -(-max(p.max_tokens_per_microbatch, config.rollout.max_tokens) // p.cp),
    }
