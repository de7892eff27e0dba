"""Stopping at a step boundary because a signal asked for it: before a Slurm job's time limit, or by hand."""

from __future__ import annotations

import signal

import torch

from megatron_sao.distributed import broadcast_json
from megatron_sao.launch.process import EXIT_STOPPED


class Stopped(RuntimeError):
    """The run ends here, before its last step; the message says why and from where it goes on.

    Attributes:
        exit_code: the trainer's.
    """

    exit_code = EXIT_STOPPED


class StopSignal:
    """SIGUSR1 and SIGTERM as a request that the ranks heed together.

    Args:
        device: of this rank, for its collectives.
        sync_interval: ``rl.sync_interval``. RL stops only where a push is due: a resumed run brings its policy to the
            engines, so elsewhere it would push what an uninterrupted one does not.
    """

    def __init__(self, device: torch.device, sync_interval: int) -> None:
        self._device, self._sync_interval = device, sync_interval
        self._received: str | None = None

    def listen(self) -> None:
        """Take over both signals; call it from the main thread. Until then they end the process at once."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def check(self, stage: str, step: int) -> None:
        """Raise Stopped on all ranks if rank 0 has had a signal, with ``step`` being the next to do. Collective."""
        if stage == "rl" and step % self._sync_interval:
            return
        received = broadcast_json(self._received, self._device)
        if received is not None:
            raise Stopped(f"stopped by {received}")

    def _on_signal(self, number: int, _frame: object) -> None:
        self._received = signal.Signals(number).name
