"""Where metrics go besides the run directory: Prometheus and Weights & Biases."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from megatron_sao.config import ConfigError, LoggingConfig, RunConfig


class PrometheusEndpoint(Collector):
    """Serves ``/metrics``: the newest value of every metric as ``megatron_sao_trainer_<name>{run, stage}``.

    Raises:
        ConfigError: the port cannot be listened on.
    """

    def __init__(self, run: str, config: LoggingConfig) -> None:
        self._run = run
        self._values: dict[tuple[str, str], float] = {}
        registry = CollectorRegistry()
        host, port = config.prometheus_host, config.prometheus_port
        try:
            self._server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"logging.prometheus_port = {port}: cannot listen on {host}:{port} ({error.strerror}); choose another "
                "port, 0 for any free one, or leave it out"
            ) from error
        registry.register(self)
        self.port = self._server.server_port

    def write(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        values = {(name, stage): value for name, value in (metrics | {"step": step}).items()}
        self._values = self._values | values  # a new mapping: another thread may be reading the old one

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for (name, stage), value in self._values.items():
            exported = "megatron_sao_trainer_" + re.sub(r"\W", "_", name)
            if exported not in families:
                families[exported] = GaugeMetricFamily(exported, name, labels=["run", "stage"])
            families[exported].add_metric([self._run, stage], value)
        return iter(families.values())

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class WandbRun:
    """A run in the project ``logging.wandb_project``, resumed by the id that the run directory keeps.

    Raises:
        ConfigError: the package wandb is not installed.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"logging.wandb_project = {config.logging.wandb_project!r} needs the package wandb, which is not "
                "installed here; `pip install wandb`, or leave the field out"
            ) from error
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=config.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
        )
        for stage in ("sft", "value", "rl"):  # wandb's own step only ever grows, but a resumed run repeats steps
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        self._run.log({f"{stage}/{name}": value for name, value in (metrics | {"step": step}).items()})

    def close(self) -> None:
        self._run.finish()
