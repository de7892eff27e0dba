"""Versions through a directory: what the trainer publishes is what the engines' sidecars hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_sao.config import WeightsConfig
from megatron_sao.models.backend import Backend
from megatron_sao.weights.delta import LocalCopy
from megatron_sao.weights.publish import Publisher, Receiver
from megatron_sao.weights.verify import EngineChecksums, add_bucket
from tests.tiny_models import write_llama
from tests.trainer_side import PolicySide

pytestmark = pytest.mark.distributed

ENGINE = [Receiver("key", "engine-0", "http://unused", 1)]


@pytest.fixture(params=["float32", "bfloat16"])
def policy(request: pytest.FixtureRequest, world: Backend, tmp_path_factory: pytest.TempPathFactory) -> PolicySide:
    path = write_llama(tmp_path_factory.mktemp("models") / "llama", intermediate_size=128)
    return PolicySide(path, request.param)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[LocalCopy]:
    """Kept by a thread, as a sidecar does."""
    made, done = LocalCopy(tmp_path, "engine-0", tmp_path / "copies" / "engine-0"), threading.Event()

    def work() -> None:
        while not done.wait(0.05):
            made.advance()

    thread = threading.Thread(target=work)
    thread.start()
    yield made
    done.set()
    thread.join()


def publisher(policy: PolicySide, directory: Path, timeout: float = 100.0) -> Publisher:
    settings = WeightsConfig(mode="delta", timeout=timeout)
    return Publisher(policy.gatherer(), policy.model, settings, directory)


def assert_holds(directory: Path, policy: PolicySide) -> None:
    expected = dict(policy.exporter.tensors())
    found = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_engine_loads_a_full_version_first_and_then_its_patched_copy(
    policy: PolicySide, copy: LocalCopy, tmp_path: Path
) -> None:
    writer = publisher(policy, tmp_path)
    assert writer.publish(ENGINE, "1.0", []) == {"key": tmp_path / "full" / "1.0"}
    assert_holds(tmp_path / "full" / "1.0", policy)
    for number in (1, 2):
        policy.perturb(number, fraction=0.01)
        (path,) = writer.publish(ENGINE, f"1.{number}", []).values()
        assert path == tmp_path / "copies" / "engine-0" and copy.version == f"1.{number}"
        assert_holds(path, policy)
        assert 0 < writer.delta_size.changed < 0.02 * writer.delta_size.elements
    assert writer.publish(ENGINE, "1.2", []) == {"key": path}, "the same version again, for an engine that is late"
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_a_patched_copy_the_engine_gets_a_full_version_after_the_timeout(
    policy: PolicySide, tmp_path: Path
) -> None:
    writer = publisher(policy, tmp_path, timeout=0.2)
    writer.publish(ENGINE, "1.0", [])
    policy.perturb(1)
    assert writer.publish(ENGINE, "1.1", []) == {"key": tmp_path / "full" / "1.1"}
    assert_holds(tmp_path / "full" / "1.1", policy)


@pytest.mark.parametrize("mode", ["disk", "delta"])
def test_checksums_are_of_the_weights_published_however_they_travel(
    mode: str, policy: PolicySide, copy: LocalCopy, tmp_path: Path
) -> None:
    writer = Publisher(policy.gatherer(), policy.model, WeightsConfig(mode=mode, timeout=100.0), tmp_path)
    for number in range(2):
        policy.perturb(number)
        seen, expected = (EngineChecksums(policy.model, 2, torch.float32) for _ in range(2))
        writer.publish(ENGINE, f"1.{number}", [seen])
        for bucket in policy.gatherer().buckets():
            add_bucket([expected], bucket)
        assert seen.result() == expected.result()
