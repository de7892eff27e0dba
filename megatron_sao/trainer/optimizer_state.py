"""What an optimizer remembers, in a form that any other layout can take over.

Megatron's own form depends on how the optimizer is put together: one part for all parameters, or one more for experts
that are split over ranks, each with its parameter groups; main weights under one name with the distributed optimizer,
under another or none without it. Here a checkpoint holds Adam's two moments of every parameter of the *model*, in
bfloat16 also its float32 main weights, and one step count. Everything else about an optimizer is in the config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from megatron_sao.distributed import all_gather_json
from megatron_sao.trainer.trainable import Trainable

Sharded = ShardedTensor | ShardedTensorFactory
_DISTRIBUTED, _PLAIN = "optimizer.state.param.", "optimizer.state.fp32_param."  # names of main weights


def sharded_optimizer_state(
    trainable: Trainable, weights: dict[str, Any], metadata: dict[str, Any], loading: bool
) -> dict[str, Any]:
    """State of ``trainable``'s optimizer, to be saved or to be filled by ``dist_checkpointing.load``. Collective.

    Args:
        weights: sharded state of the model.
    """
    parts = {}
    for index, part in enumerate(trainable.optimizer.chained_optimizers):
        allocates = loading and part.init_state_fn is not None  # SGD has nothing to allocate, and Megatron would fail
        state = part.sharded_state_dict(weights, is_loading=allocates, metadata=metadata)
        groups = part.optimizer.state_dict()["param_groups"]
        _with_groups(part, state)["param_groups"] = LocalNonpersistentObject(groups)
        if isinstance(part, DistributedOptimizer):
            state["param_state"] = _as_plain(part, state["param_state"])
            state["param_state_sharding_type"] = LocalNonpersistentObject(state["param_state_sharding_type"])
        if isinstance(part, Float16OptimizerWithFloat16Params):  # lists would close up over a group without parameters
            groups = state["fp32_from_fp16_params"]
            state["fp32_from_fp16_params"] = {i: dict(enumerate(group)) for i, group in enumerate(groups)}
        parts[index] = state
    return {"parts": parts} if loading else {"parts": parts, "steps": _steps(trainable)}


def load_optimizer_state(trainable: Trainable, loaded: dict[str, Any]) -> None:
    """Take over what was loaded into :func:`sharded_optimizer_state`, after the model has taken over its weights."""
    for index, part in enumerate(trainable.optimizer.chained_optimizers):
        state = loaded["parts"][index]
        inner = _with_groups(part, state)
        for group in inner["param_groups"]:
            group["step"] = loaded["steps"]
        if not isinstance(part, DistributedOptimizer):
            inner.setdefault("state", {})  # empty for SGD, and where a rank trains none of these parameters
        if isinstance(part, Float16OptimizerWithFloat16Params):
            groups = state.get("fp32_from_fp16_params", {})
            state["fp32_from_fp16_params"] = [
                [groups[i][j] for j in range(len(group["params"]))] for i, group in enumerate(inner["param_groups"])
            ]
        part.load_state_dict(state)


def _steps(trainable: Trainable) -> int:
    """Steps taken, the same on every rank: one that trains no parameter of the model need not count."""
    groups = [group for part in trainable.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    return max(all_gather_json(max(int(group.get("step", 0)) for group in groups), trainable.device))


def _with_groups(part: MegatronOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    return state if isinstance(part, FP32Optimizer) else state["optimizer"]


def _as_plain(part: DistributedOptimizer, state: dict[int, dict[str, Sharded]]) -> dict[int, dict[str, Any]]:
    """The distributed optimizer's state per parameter, its main weights as the plain optimizers have them: in bfloat16
    under another name, in float32 not at all, since there they are the weights, which are saved with the model."""
    params = [param for buffer in part.buffers for param in buffer.param_index_map]  # the order of ``state``
    out: dict[int, dict[str, Any]] = {}
    for (index, tensors), param in zip(state.items(), params, strict=True):
        main = tensors["param"]
        if part.config.bf16:
            name = main.key.removeprefix(_DISTRIBUTED)
            out[index] = tensors | {"param": replace(main, key=_PLAIN + name)}
        else:
            out[index] = tensors | {"param": LocalNonpersistentObject(param.data)}
    return out
