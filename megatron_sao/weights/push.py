"""Current weights into running SGLang servers, while their requests are in flight.

A push pauses generation (requests are retracted, none is lost), brings every tensor, flushes the KV cache, labels the
new version, compares checksums where that is due, and continues. Cached keys of the old weights would otherwise be
mixed with the new ones: without the flush log-probabilities are silently wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sao.config import WeightsConfig
from megatron_sao.distributed import all_gather_json, broadcast_json
from megatron_sao.models.hf import HFModel
from megatron_sao.weights.gather import Bucket, Gatherer, use_in_turn
from megatron_sao.weights.link import EngineControl, SourceLink
from megatron_sao.weights.publish import Publisher, Receiver
from megatron_sao.weights.reshard import Layout, Plan, Weight, build_plan, spread_sources
from megatron_sao.weights.verify import EngineChecksums, add_bucket, differences

log = logging.getLogger(__name__)

_NAMED = 8  # tensors of an error message


class WeightMismatch(RuntimeError):
    """An engine does not hold the weights that were sent to it; the message names the tensors."""


def push_plan(weights: Sequence[Weight], layout: Layout, settings: WeightsConfig) -> Plan:
    """Who gathers and sends what in every push. Raises ConfigError."""
    sources = spread_sources(layout, settings.sources_per_stage)
    return build_plan(weights, layout, settings.bucket_bytes, sources, experts_together=settings.verify_every > 0)


class WeightPusher:
    """Brings a gatherer's weights to engines. Every method is collective over trainer ranks.

    The leader (rank 0) speaks to the engines; source ranks send. Errors of one engine stop neither the others nor the
    trainer; what all ranks do next is agreed after each phase.

    Args:
        gatherer: of a plan made by :func:`push_plan` with the same ``settings``.
        token: the engines' key.
        backend: ``gloo`` or ``nccl``.
        directory: where version directories go, for ``weights.mode`` disk and delta.
        dtype: in which the engines serve.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        model: HFModel,
        settings: WeightsConfig,
        token: str,
        backend: str,
        directory: Path,
        dtype: torch.dtype,
    ) -> None:
        self._gatherer, self._model, self._settings = gatherer, model, settings
        self._token, self._backend, self._dtype = token, backend, dtype
        self.publisher = Publisher(gatherer, model, settings, directory)
        self._rank = dist.get_rank()
        self._device = gatherer.device
        self._controls: dict[str, EngineControl] = {}  # on the leader
        self._links: dict[str, SourceLink] = {}  # on sources
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="engine")
        self._pushes = 0
        if settings.verify_every:
            EngineChecksums(model, 1, dtype)  # raises where the model cannot be verified
        # Of the last push, in seconds. On the leader "stall" is how long the slowest engine generated nothing.
        self.times: dict[str, float] = {}
        self._paused: dict[str, float] = {}

    def push(self, receivers: list[Receiver], version: str) -> dict[str, str]:
        """Send the current weights to ``receivers`` (the leader's count) as ``version``.

        Returns:
            Error text by key of the engines that failed, the same on every rank: their weights are mixed, they must
            not serve. The others hold the new weights and are generating again.

        Raises:
            WeightMismatch: on every rank, when an engine's checksums are not those of what was sent.
        """
        receivers = [Receiver(**r) for r in broadcast_json([asdict(r) for r in receivers], self._device)]
        if not receivers:
            return {}
        due = self._settings.verify_every > 0 and self._pushes % self._settings.verify_every == 0
        self._pushes += 1
        self.times, self._paused = {}, {}
        checksums = [EngineChecksums(self._model, tp, self._dtype) for tp in sorted({r.tp for r in receivers}) if due]
        self._forget(receivers)
        failed = self._agree(self._each(receivers, {}, self._contact) if self._rank == 0 else {})
        if self._settings.mode == "group":
            failed, conclude = self._send(receivers, failed, version, checksums)
        else:
            failed, conclude = self._publish(receivers, failed, version, checksums)
        expected = self._expected(checksums) if due else {}
        wrong: dict[str, list[str]] = {}
        stalls: list[float] = []

        def finish(receiver: Receiver) -> None:
            conclude(receiver)
            control = self._controls[receiver.key]
            if due:
                wrong[receiver.url] = differences(expected[receiver.tp], control.checksums())
            if not wrong.get(receiver.url):
                control.resume()
                stalls.append(time.monotonic() - self._paused[receiver.key])

        if self._rank == 0:
            failed |= self._each(receivers, failed, finish)
            self.times["stall"] = max(stalls, default=0.0)
        failed, wrong = broadcast_json([failed, wrong], self._device)
        self._abandon(receivers, failed, wrong)
        if any(wrong.values()):
            raise WeightMismatch(_mismatch(version, wrong))
        return failed

    def close(self) -> None:
        for key in list(self._controls):
            self._controls.pop(key).close()
        for key in list(self._links):
            self._links.pop(key).close(wait=True)
        self._threads.shutdown(wait=False)

    def _send(
        self, receivers: list[Receiver], failed: dict[str, str], version: str, checksums: list[EngineChecksums]
    ) -> tuple[dict[str, str], Callable[[Receiver], None]]:
        """Broadcast every bucket to every engine, which pauses only when as many are ready as there is memory for. The
        leader then has to label and end the update."""
        if self._gatherer.is_source:
            failed = failed | self._each(receivers, failed, lambda r: self._links[r.key].connect())
        failed = self._agree(failed)

        def begin(receiver: Receiver) -> None:
            self._pause(receiver)
            self._controls[receiver.key].begin()

        buckets = self._gatherer.buckets()
        ready = list(islice(buckets, 2))
        dist.barrier()  # no engine is to pause while some other source still gathers
        failed = self._agree(failed | (self._each(receivers, failed, begin) if self._rank == 0 else {}))
        started = time.monotonic()

        def send(_number: int, bucket: Bucket) -> None:
            sending = {
                r.key: self._threads.submit(self._links[r.key].send, bucket) for r in receivers if r.key not in failed
            }
            add_bucket(checksums, bucket)
            for key, future in sending.items():
                self._attempt(key, failed, future.result)

        use_in_turn(chain(ready, buckets), send)
        if self._gatherer.is_source:
            failed |= self._each(receivers, failed, lambda r: self._links[r.key].finish())
        failed = self._agree(failed)
        self.times["send"] = time.monotonic() - started

        def conclude(receiver: Receiver) -> None:
            control = self._controls[receiver.key]
            control.label(version, self._links[receiver.key].group_name, self._settings.pause == "retract")
            control.end()

        return failed, conclude

    def _publish(
        self, receivers: list[Receiver], failed: dict[str, str], version: str, checksums: list[EngineChecksums]
    ) -> tuple[dict[str, str], Callable[[Receiver], None]]:
        """Have the weights on a shared file system. The leader has to have them loaded."""
        started = time.monotonic()
        paths = self.publisher.publish(receivers, version, checksums)
        self.times["write"] = time.monotonic() - started

        def conclude(receiver: Receiver) -> None:
            self._pause(receiver)
            self._controls[receiver.key].load(paths[receiver.key], version, self._settings.pause == "retract")

        return failed, conclude

    def _pause(self, receiver: Receiver) -> None:
        self._paused[receiver.key] = time.monotonic()
        self._controls[receiver.key].pause(self._settings.pause)

    def _expected(self, checksums: list[EngineChecksums]) -> dict[int, list[dict[str, str]]]:
        """By tensor-parallel size what an engine of that size must report, put together from all sources."""
        merged: dict[int, list[dict[str, str]]] = {}
        for part in all_gather_json([[c.tp, c.result()] for c in checksums], self._device):
            for tp, ranks in part:
                whole = merged.setdefault(tp, [{} for _ in range(tp)])
                for all_names, names in zip(whole, ranks, strict=True):
                    all_names.update(names)
        return merged

    def _contact(self, receiver: Receiver) -> None:
        if receiver.key not in self._controls:
            control = EngineControl(receiver.url, self._token, self._settings.timeout)
            self._controls[receiver.key] = control
            control.end_abandoned_update()

    def _forget(self, receivers: list[Receiver]) -> None:
        """Drop connections to engines that may be new processes, and prepare those of this push."""
        for receiver in receivers:
            if receiver.fresh:
                self._drop(receiver.key)
            if self._gatherer.is_source and self._settings.mode == "group" and receiver.key not in self._links:
                timeout = self._settings.timeout
                control = EngineControl(receiver.url, self._token, timeout)
                self._links[receiver.key] = SourceLink(control, receiver.tp, self._backend, timeout)

    def forget(self, keys: list[str]) -> None:
        """Leave engines that are gone. The leader's ``keys`` count."""
        for key in broadcast_json(keys, self._device):
            self._drop(key)

    def _drop(self, key: str) -> None:
        if (control := self._controls.pop(key, None)) is not None:
            control.close()
        if (link := self._links.pop(key, None)) is not None:
            link.close()

    def _abandon(self, receivers: list[Receiver], failed: dict[str, str], wrong: dict[str, list[str]]) -> None:
        bad = [r for r in receivers if r.key in failed or wrong.get(r.url)]
        if self._rank == 0:
            self._each([r for r in bad if r.key in self._controls], {}, lambda r: self._controls[r.key].abandon())
        for receiver in bad:
            self._drop(receiver.key)

    def _each(
        self, receivers: list[Receiver], failed: dict[str, str], action: Callable[[Receiver], None]
    ) -> dict[str, str]:
        """Do something with all engines that have not failed, at the same time; the errors by key."""
        running = {r.key: self._threads.submit(action, r) for r in receivers if r.key not in failed}
        errors: dict[str, str] = {}
        for key, future in running.items():
            self._attempt(key, errors, future.result)
        return errors

    def _attempt(self, key: str, failed: dict[str, str], action: Callable[[], None]) -> None:
        try:
            action()
        except (RuntimeError, OSError) as error:  # PushError, what torch.distributed raises, an unresolvable host
            log.warning("weight push to %s failed: %s", key, error)
            failed.setdefault(key, str(error))

    def _agree(self, failed: dict[str, str]) -> dict[str, str]:
        """What failed anywhere, on every rank."""
        merged: dict[str, str] = {}
        for part in all_gather_json(failed, self._device):
            merged = part | merged
        return merged


def _mismatch(version: str, wrong: dict[str, list[str]]) -> str:
    engines = "; ".join(
        f"{url}: {', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
        for url, names in wrong.items()
        if names
    )
    return f"engines do not hold weights {version} as they were sent, so training stops: {engines}"
