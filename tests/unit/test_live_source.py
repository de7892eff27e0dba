"""What a live run's metrics say of its buffer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from megatron_sao.trainer.metrics import MetricsWriter
from megatron_sao.trainer.source import LiveSource
from tests.store_bench import Bench
from tests.trajectories import make_config


def test_the_share_dropped_as_stale_is_in_every_steps_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rl={"batch_size": 2, "max_staleness": 1})
    bench.train()
    stale, failed, *fresh = bench.lease(4)
    bench.play(stale, "1.0")
    bench.play(failed, failure="sandbox crashed")
    for lease in fresh:
        bench.play(lease, "1.2")
    client = SimpleNamespace(stats=bench.store.stats)
    source = LiveSource(client, None, SimpleNamespace(is_leader=True), None, None)
    writer = MetricsWriter(tmp_path, make_config(tmp_path))
    writer.write("rl", 1, source.counters())
    assert len(bench.batch(2, policy_version=2)) == 2
    writer.write("rl", 2, source.counters())
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["buffer/dropped_stale_fraction"] for line in lines] == [0, 1 / 3]
    assert lines[1]["buffer/dropped_stale"] == 1 and lines[1]["buffer/train_trajectories_accepted"] == 3
    bench.store.close()
