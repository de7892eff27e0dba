"""The door: what a body must be to become a trajectory of this run. Pure; runs on any thread."""

from __future__ import annotations

from megatron_sao.buffer.segments import Frame, Record
from megatron_sao.config import RunConfig
from megatron_sao.data.routing import RoutingShape
from megatron_sao.data.trajectory import Trajectory, TrajectoryError


def admit(
    payload: bytes | memoryview,
    config: RunConfig,
    vocab_size: int,
    routing: RoutingShape | None = None,
    frame: Frame | None = None,
) -> tuple[Trajectory, Record]:
    """The trajectory in a request's body, and what to store.

    Args:
        vocab_size: of the model.
        routing: of the model; None if it has no routed experts.
        frame: that the payload lies in, if it does.

    Raises:
        TrajectoryError: not the wire format, malformed, or sampled in a way that the trainer could not learn from.
    """
    trajectory = Trajectory.decode(payload)
    valid = trajectory.validate(vocab_size, config.rollout.max_tokens, routing)
    if valid.failure is None:
        _check_sampling(valid, config)
    return valid, Record.of(payload, frame) if valid is trajectory else Record.of(valid.encode())


def _check_sampling(trajectory: Trajectory, config: RunConfig) -> None:
    """The trainer would end the run over any of these, and the batch with it."""
    evaluation = trajectory.kind == "eval"
    expected = 1.0 if evaluation else config.rollout.sampling.temperature
    given = trajectory.sampling.get("temperature")
    if given != expected:
        raise TrajectoryError(f"sampling: temperature {given} is not the {expected:g} of this run's {trajectory.kind}")
    truncated = config.rollout.sampling.truncated and not evaluation
    if (trajectory.support is not None) != truncated:
        raise TrajectoryError(
            f"support: is {'missing' if truncated else 'recorded'}, but this run's {trajectory.kind} sampling "
            f"{'is' if truncated else 'is not'} truncated (rollout.sampling.top_k)"
        )
    most = config.engine.sampling_mask_max_tokens
    if trajectory.support is not None and (largest := trajectory.support.counts.max(initial=0)) > most:
        raise TrajectoryError(f"support: has {largest} ids for one token, but an engine records {most} at most")
    if config.algorithm.routing_replay and trajectory.routed_experts is None:
        raise TrajectoryError("routed_experts: are missing, and algorithm.routing_replay = true trains on them")
