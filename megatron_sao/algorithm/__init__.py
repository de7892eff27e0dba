"""The tensor maths of SAO and its baselines: no Megatron, no I/O (arXiv 2607.07508)."""

from megatron_sao.algorithm.critic import value_loss
from megatron_sao.algorithm.dis import RATIO_EDGES, dis_policy_loss, ratio_histogram
from megatron_sao.algorithm.gae import batched_skip_observation_gae, length_adaptive_lambda, skip_observation_gae
from megatron_sao.algorithm.grpo import group_advantages
from megatron_sao.algorithm.kl import kl_to_rollout_policy
from megatron_sao.algorithm.ppo import ppo_clip_policy_loss
from megatron_sao.algorithm.running_mean import RunningMeanBaseline

__all__ = [
    "RATIO_EDGES",
    "RunningMeanBaseline",
    "batched_skip_observation_gae",
    "dis_policy_loss",
    "group_advantages",
    "kl_to_rollout_policy",
    "length_adaptive_lambda",
    "ppo_clip_policy_loss",
    "ratio_histogram",
    "skip_observation_gae",
    "value_loss",
]
