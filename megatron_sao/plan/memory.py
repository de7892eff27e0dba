"""What each rank needs in its GPU and in its share of the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sao.config import RunConfig
from megatron_sao.plan.activations import Activations
from megatron_sao.plan.simulate import SimulatedModel, State

GB = 10**9
# Estimates: a CUDA context, the buffers of NCCL and cuBLAS, and what the allocator cannot use; a trainer process.
RESERVED_BYTES, PROCESS_BYTES = 5 * GB, 4 * GB


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank in the RL stage, the stage that needs most.

    Attributes:
        policy, critic: what stays between steps; None without a critic.
        offloaded: whether the optimizers' part of that waits in host memory except during its own step.
        in_turn: whether the model that is not at work waits there too, without its gradients.
        temporaries: of the optimizer's step.
        pushed: the weights that the engines have, where a baseline's ratio needs them.
        activations: of the worst micro-batch.
        push: a bucket on its way to the engines, and the next one, being put together.
        saved_copy: in host memory, of what an asynchronous checkpoint writes while training goes on.
    """

    policy: State
    critic: State | None
    offloaded: bool
    in_turn: bool
    temporaries: int
    pushed: int
    activations: Activations
    push: int
    saved_copy: int

    @property
    def states(self) -> list[State]:
        return [state for state in (self.policy, self.critic) if state is not None]

    @property
    def resident(self) -> int:
        """On the GPU all the time."""
        optimizers = 0 if self.offloaded else sum(s.optimizer for s in self.states)
        models = 0 if self.in_turn else sum(s.weights + s.gradients for s in self.states)
        return models + optimizers + self.pushed + RESERVED_BYTES

    @property
    def phases(self) -> dict[str, int]:
        """What the GPU holds at the worst moment of each phase of a step."""
        training = [s.weights + s.gradients if self.in_turn else 0 for s in self.states]
        restored = [s.optimizer if self.offloaded else 0 for s in self.states]
        phases = {
            "forward and backward": self.resident + max(training) + self.activations.total,
            "optimizer step": self.resident + max(map(sum, zip(training, restored, strict=True))) + self.temporaries,
            "weight push": self.resident + (self.policy.weights if self.in_turn else 0) + self.push,
        }
        if self.in_turn:  # else it takes nothing that is not there already
            phases["checkpoint"] = self.resident + sum(s.weights for s in self.states)
        return phases

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def worst_phase(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def host(self) -> int:
        optimizers = sum(s.optimizer for s in self.states) if self.offloaded else 0
        models = sum(s.weights for s in self.states) if self.in_turn else 0  # room for each, at work or not
        return PROCESS_BYTES + self.saved_copy + optimizers + models


def rank_memory(
    config: RunConfig,
    policy: SimulatedModel,
    states: dict[str, State],
    acts: Activations,
    largest_tensor: int,
    sends: bool,
) -> RankMemory:
    """Of one rank.

    Args:
        largest_tensor: bytes of the model's largest HF tensor.
        sends: whether this rank puts tensors together and sends them to the engines.
    """
    # Without Transformer Engine Adam makes its denominators, one per trained element, before it divides.
    unfused = config.model.layers == "native" and config.rl.policy_optimizer.name == "adam"
    temporaries = max(state.trained for state in states.values()) if unfused else 0
    keeps_pushed = config.algorithm.pi_old == "latest_pushed"
    return RankMemory(
        policy=states["policy"],
        critic=states.get("critic"),
        offloaded=config.parallel.offload_optimizer,
        in_turn=config.parallel.offload_idle_model,
        temporaries=temporaries,
        pushed=states["policy"].weights if keeps_pushed else 0,
        activations=acts,
        push=2 * max(largest_tensor, config.weights.bucket_bytes) if sends else 0,
        saved_copy=sum(s.weights + s.optimizer for s in states.values()) if config.checkpoint.asynchronous else 0,
    )
