"""SAO's tensor maths: pure functions of tensors, no Megatron, no I/O (arXiv 2607.07508)."""

from megatron_sao.algorithm.critic import explained_variance, value_loss
from megatron_sao.algorithm.dis import dis_policy_loss
from megatron_sao.algorithm.gae import batched_skip_observation_gae, length_adaptive_lambda, skip_observation_gae

__all__ = [
    "batched_skip_observation_gae",
    "dis_policy_loss",
    "explained_variance",
    "length_adaptive_lambda",
    "skip_observation_gae",
    "value_loss",
]
