"""Alarms: what a run is watched for, from its config's section ``alarms``.

Rank 0 judges and the others are told, so that all of them save the same checkpoint and end together.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from megatron_sao.config import Alarm, AlarmsConfig
from megatron_sao.distributed import broadcast_json
from megatron_sao.launch.process import EXIT_ALARM
from megatron_sao.trainer.stop import Stopped

log = logging.getLogger(__name__)


class AlarmStop(Stopped):
    """An alarm whose action is ``stop`` went off; the message names quantity, value, limit and field."""

    exit_code = EXIT_ALARM


class Alarms:
    """Judges metrics and waits. Every method is collective and raises AlarmStop on all ranks or on none.

    Args:
        device: of this rank, for its collectives.
    """

    def __init__(self, config: AlarmsConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._in_a_row: Counter[str] = Counter()  # steps that each field's quantity has been beyond its limit

    def check(self, metrics: dict[str, float | int | str]) -> None:
        """Judge the metrics of one training step; only rank 0's count."""
        self._heed([*self._nonfinite(metrics), *self._beyond(metrics)])

    def waiting(self) -> Callable[[], None]:
        """A call to repeat while a step waits for its batch."""
        began, alarm, warned = time.monotonic(), self._config.no_data_for, False

        def check() -> None:
            nonlocal warned
            seconds = time.monotonic() - began
            if alarm is None:
                return
            late = seconds > alarm.limit and not warned
            sentence = (
                f"no batch for {seconds:.0f} s, more than alarms.no_data_for.limit = {alarm.limit:g}; look at the "
                "engines and workers (`megatron-sao status`)"
            )
            self._heed([(sentence, alarm.action)] if late else [])
            warned = warned or late

        return check

    def _heed(self, raised: list[tuple[str, str]]) -> None:
        stop = None
        for sentence, action in raised:
            log.warning("ALARM: %s", sentence)
            if action == "stop":
                stop = stop or sentence
        stop = broadcast_json(stop, self._device)
        if stop is not None:
            raise AlarmStop(f"stopped by an alarm: {stop}")

    def _nonfinite(self, metrics: dict[str, float | int | str]) -> Iterator[tuple[str, str]]:
        names = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
        if names and self._config.nonfinite != "ignore":
            sentence = f"{names[0]} = {metrics[names[0]]} ({len(names)} metrics are not finite); see alarms.nonfinite"
            yield sentence, self._config.nonfinite

    def _beyond(self, metrics: dict[str, float | int | str]) -> Iterator[tuple[str, str]]:
        for field, quantity, value in _quantities(metrics):
            alarm: Alarm | None = getattr(self._config, field)
            if alarm is None:
                continue
            beyond = value < alarm.limit if field.endswith("_below") else value > alarm.limit
            self._in_a_row[field] = self._in_a_row[field] + 1 if beyond else 0
            if self._in_a_row[field] == alarm.steps:  # once, until it has been within the limit again
                direction = "below" if field.endswith("_below") else "above"
                sentence = f"{quantity} = {value:.4g}, {direction} alarms.{field}.limit = {alarm.limit:g}"
                yield sentence + (f" in {alarm.steps} steps in a row" if alarm.steps > 1 else ""), alarm.action


def _quantities(metrics: dict[str, float]) -> Iterator[tuple[str, str, float]]:
    """(field of the section, name of the quantity, value) of each that these metrics tell."""
    if "train/entropy" in metrics:
        yield "entropy_below", "train/entropy", metrics["train/entropy"]
    if "dis/accepted_fraction" in metrics:
        yield "masked_above", "1 - dis/accepted_fraction", 1 - metrics["dis/accepted_fraction"]
    if metrics.get("lag/own_tokens"):
        yield "mismatch_above", "lag/own_abs_logprob_diff", metrics["lag/own_abs_logprob_diff"]
