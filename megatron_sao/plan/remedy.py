"""What would make a run fit that does not."""

from __future__ import annotations

from megatron_sao.config import ConfigError, RunConfig, override_config
from megatron_sao.models.hf import HFModel
from megatron_sao.plan.layout import check_layout
from megatron_sao.plan.planner import fits_cluster, plan_ranks

MORE_RANKS = (2, 4, 8)


def find_remedy(config: RunConfig, model: HFModel, worst_stage: int) -> list[str] | None:
    """Overrides under which it fits: what costs time alone first, then more ranks. None where none of them suffices.

    Args:
        worst_stage: the pipeline stage to try first.
    """
    tried: list[str] = []
    for override in _cheaper_settings(config):
        tried.append(override)
        if _fits(override_config(config, tried), model, worst_stage):
            return tried
    for factor in MORE_RANKS:
        larger = [*dict.fromkeys([*tried, *_more_ranks(config, model, factor)])]
        try:
            if _fits(override_config(config, larger), model, worst_stage):
                return larger
        except ConfigError:  # the model cannot be divided so far
            continue
    return None


def _cheaper_settings(config: RunConfig) -> list[str]:
    parallel = config.parallel
    replicated = parallel.world_size > parallel.tp * parallel.pp
    settings = {
        "model.recompute=full": config.model.recompute != "full",
        "parallel.distributed_optimizer=true": replicated and not parallel.distributed_optimizer,
        "parallel.offload_optimizer=true": config.model.dtype != "float32" and not parallel.offload_optimizer,
        "parallel.offload_idle_model=true": config.algorithm.advantage == "critic" and not parallel.offload_idle_model,
    }
    return [override for override, helps in settings.items() if helps]


def _more_ranks(config: RunConfig, model: HFModel, factor: int) -> list[str]:
    """A larger world, which shares tokens, optimizer and experts."""
    parallel = config.parallel
    sizes = {"world_size": parallel.world_size, "cp": parallel.cp}
    if model.num_experts:
        sizes["ep"] = parallel.ep
    more = [f"parallel.{name}={size * factor}" for name, size in sizes.items()]
    return more if parallel.distributed_optimizer else [*more, "parallel.distributed_optimizer=true"]


def _fits(config: RunConfig, model: HFModel, worst_stage: int) -> bool:
    """Looks at the first rank of each pipeline stage, which has its largest share of everything."""
    check_layout(config, model)
    per_stage = config.parallel.world_size // config.parallel.pp
    worst = [plan for plan, _ in plan_ranks(config, model, [worst_stage * per_stage])]
    if not fits_cluster(config, worst):
        return False
    return fits_cluster(
        config, [plan for plan, _ in plan_ranks(config, model, range(0, config.parallel.world_size, per_stage))]
    )
