"""New weights in real SGLang servers: every mode, verified, with deaths, joins and wrong weights.

A MoE and a tied dense model, each on one and on two servers of one rank and on a server of two. The trainer is this
process; the last tests push from two ranks.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_sao.config import SamplingConfig
from megatron_sao.models.backend import Backend
from megatron_sao.rollout.client import EngineClient, Generation, ModelLimits
from megatron_sao.weights.delta import LocalCopy
from megatron_sao.weights.gather import Bucket
from megatron_sao.weights.link import EngineControl, SourceLink
from megatron_sao.weights.push import WeightMismatch, WeightPusher
from megatron_sao.weights.verify import EngineChecksums, differences
from tests.serving import TOKEN, Server, run_config, serving, starting, wait_for
from tests.tiny_models import write_llama
from tests.trainer_side import PolicySide, receiver

pytestmark = [pytest.mark.system, pytest.mark.timeout(480)]

SAMPLING = SamplingConfig()
PROMPT = [7, 12, 3, 14, 8, 13, 2, 15]


@pytest.fixture(scope="module")
def second_server(glm4_moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("e1", run_config(glm4_moe_path), tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied dense model, of sizes that SGLang does not pad."""
    return write_llama(tmp_path_factory.mktemp("models") / "llama", intermediate_size=128)


@pytest.fixture(params=["moe", "dense"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers of one rank each."""
    if request.param == "moe":
        yield [request.getfixturevalue("glm4_moe_server"), request.getfixturevalue("second_server")]
        return
    config = run_config(request.getfixturevalue("dense_path"))
    with starting("d0", config, tmp_path) as first, serving("d1", config, tmp_path) as second:
        wait_for(first)
        yield [first, second]


@pytest.fixture(scope="module", params=["dense", "moe"])
def wide_server(
    request: pytest.FixtureRequest, dense_path: Path, glm4_moe_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of two ranks."""
    path = {"dense": dense_path, "moe": glm4_moe_path}[request.param]
    config = run_config(path, engine={"tp": 2})
    with serving("wide", config, tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture(scope="module")
def moe(world: Backend, glm4_moe_path: Path) -> PolicySide:
    return PolicySide(glm4_moe_path)


@pytest.fixture
def push(moe: PolicySide, tmp_path: Path) -> Iterator[Callable[..., WeightPusher]]:
    """Makes pushers of the MoE policy and closes them."""
    made: list[WeightPusher] = []

    def make(policy: PolicySide = moe, **settings: Any) -> WeightPusher:
        made.append(policy.pusher(tmp_path / "weights", **settings))
        return made[-1]

    yield make
    for pusher in made:
        pusher.close()


def generate(server: Server, prompts: list[list[int]], tokens: int, **options: Any) -> list[Generation]:
    async def run() -> list[Generation]:
        limits = ModelLimits.of(server.model_path)

        async def registry() -> list[Any]:
            return [server.engine]

        async with EngineClient(limits, TOKEN, registry, **options) as client:
            return await asyncio.gather(*(client.generate(ids, SAMPLING, tokens) for ids in prompts))

    return asyncio.run(run())


def reference(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """float32 [L - 1]: log-probability of each token after the first, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()


def assert_holds(server: Server, policy: PolicySide) -> None:
    """Every rank's checksums are those of its share of the policy's present weights."""
    expected = EngineChecksums(policy.model, server.engine.tp, torch.float32)
    for name, tensor in policy.exporter.tensors():
        expected.add(name, tensor)
    control = EngineControl(server.engine.url, TOKEN, timeout=60)
    assert differences(expected.result(), control.checksums()) == []
    control.close()


def assert_serves(server: Server, version: str, policy: PolicySide, directory: Path, atol: float = 1e-5) -> None:
    """The engine holds the policy's present weights; fresh tokens carry ``version`` and their log-probabilities."""
    assert_holds(server, policy)
    model = AutoModelForCausalLM.from_pretrained(policy.save(directory), dtype=torch.float32).eval()
    prompts = [[1 + (7 * i + j) % 20 for j in range(4 + i)] for i in range(4)]
    for prompt, answer in zip(prompts, generate(server, prompts, 12), strict=True):
        assert answer.versions == [(version, 0, len(answer.token_ids))]  # fewer than 12 where it has ended
        expected = reference(model, prompt + answer.token_ids)[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=atol)


def errors_in_flight(
    server: Server, policy: PolicySide, pusher: WeightPusher, versions: tuple[str, str], directory: Path
) -> dict[tuple[str, bool], float]:
    """Push in the middle of twelve turns. Largest difference of a log-probability from that of the token's own version,
    by version and by whether the turn began with another."""
    for attempt in range(5):  # until the push is in their middle: this process, too, may stand still
        httpx.post(f"{server.engine.url}/flush_cache", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        errors = errors_of_a_push(server, policy, pusher, versions, directory / str(attempt))
        if (versions[1], True) in errors:
            return errors
    raise AssertionError("no turn was under way when the weights changed")


def errors_of_a_push(
    server: Server, policy: PolicySide, pusher: WeightPusher, versions: tuple[str, str], directory: Path
) -> dict[tuple[str, bool], float]:
    policy.reset()
    old = AutoModelForCausalLM.from_pretrained(policy.save(directory / "old"), dtype=torch.float32).eval()
    assert pusher.push([receiver(server)], versions[0]) == {}
    policy.perturb(1)
    new = AutoModelForCausalLM.from_pretrained(policy.save(directory / "new"), dtype=torch.float32).eval()
    models = dict(zip(versions, (old, new), strict=True))
    failures: list[dict[str, str]] = []
    pushing = threading.Timer(0.5, lambda: failures.append(pusher.push([receiver(server)], versions[1])))
    pushing.start()
    prompts = [[*PROMPT, 1 + i] for i in range(12)]
    answers = generate(server, prompts, 220)
    pushing.join()
    assert failures == [{}]
    errors: dict[tuple[str, bool], float] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        for version, start, end in answer.versions:
            expected = reference(models[version], [*prompt, *answer.token_ids])[len(prompt) - 1 :]
            error = float(np.abs(answer.logprobs[start:end] - expected[start:end]).max())
            kind = version, start > 0
            errors[kind] = max(errors.get(kind, 0.0), error)
    return errors


def test_weights_pushed_in_flight_label_and_score_every_token_with_its_own_version(
    glm4_moe_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], tmp_path: Path
) -> None:
    errors = errors_in_flight(glm4_moe_server, moe, push(), ("1.0", "1.1"), tmp_path)
    assert max(errors.values()) < 1e-5


def test_in_place_only_what_was_in_flight_is_scored_with_old_keys(
    second_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], tmp_path: Path
) -> None:
    errors = errors_in_flight(second_server, moe, push(pause="in_place"), ("6.2", "6.3"), tmp_path)
    inexact = errors.pop(("6.3", True))
    print(f"largest log-probability error after a switch in place: {inexact:.2g}")
    assert max(errors.values()) < 1e-5 < inexact


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Callable[[Server], LocalCopy]]:
    """Keeps copies of engines in a thread, as their sidecars do."""
    done, copies = threading.Event(), []

    def work() -> None:
        while not done.wait(0.05):
            for copy in copies:
                copy.advance()

    thread = threading.Thread(target=work)
    thread.start()

    def make(server: Server) -> LocalCopy:
        weights = tmp_path / "weights"
        copies.append(LocalCopy(weights, server.engine.id, weights / "copies" / server.engine.id))
        return copies[-1]

    yield make
    done.set()
    thread.join()


def test_an_engine_joins_between_pushes_in_every_mode(
    pair: list[Server], world: Backend, push: Callable[..., WeightPusher], sidecar, tmp_path: Path
) -> None:
    """One engine alone, the other late with the same version, then both at once."""
    policy = PolicySide(pair[0].model_path)
    receivers, copies = [receiver(server) for server in pair], [sidecar(server) for server in pair]
    for number, mode in ((2, "group"), (4, "disk"), (6, "delta")):
        pusher = push(policy, mode=mode)
        policy.perturb(number)
        for index, server in enumerate(pair):
            assert pusher.push([receivers[index]], f"1.{number}") == {}
            assert_serves(server, f"1.{number}", policy, tmp_path / f"{mode}-{index}")
        policy.perturb(number + 1)
        assert pusher.push(receivers, f"1.{number + 1}") == {}
        for index, server in enumerate(pair):
            assert_serves(server, f"1.{number + 1}", policy, tmp_path / f"{mode}-both-{index}")
        if mode == "disk":  # and the engine that joined has loaded the bytes that were there
            assert sorted(path.name for path in (tmp_path / "weights" / "full").iterdir()) == ["1.4", "1.5"]
    assert [copy.version for copy in copies] == ["1.7", "1.7"], "both were patched"
    assert not (tmp_path / "weights" / "full" / "1.7").exists()


def test_a_delta_changes_an_engine_and_a_broken_chain_falls_back_to_a_full_version(
    glm4_moe_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], sidecar, tmp_path: Path
) -> None:
    pusher, copy = push(mode="delta"), sidecar(glm4_moe_server)
    assert pusher.push([receiver(glm4_moe_server)], "2.0") == {}
    for number, seed in ((1, 11), (2, 12)):
        moe.perturb(seed, fraction=0.01)
        assert pusher.push([receiver(glm4_moe_server)], f"2.{number}") == {}
        assert copy.version == f"2.{number}"
        size = pusher.publisher.delta_size
        assert 0.005 < size.changed / size.elements < 0.015 and size.nbytes < 0.05 * size.full_nbytes
    assert_serves(glm4_moe_server, "2.2", moe, tmp_path / "patched")
    weights = next((tmp_path / "weights" / "copies" / "e0").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-3])
    moe.perturb(13, fraction=0.01)
    assert pusher.push([receiver(glm4_moe_server)], "2.3") == {}
    assert copy.version is None
    assert_serves(glm4_moe_server, "2.3", moe, tmp_path / "full")
    moe.perturb(14, fraction=0.01)
    assert pusher.push([receiver(glm4_moe_server)], "2.4") == {}
    assert copy.version == "2.4", "seeded from the full version, then patched"
    assert_serves(glm4_moe_server, "2.4", moe, tmp_path / "again")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_of_an_engine_hold_their_shares_in_every_mode(
    dtype: str, wide_server: Server, world: Backend, push: Callable[..., WeightPusher], sidecar, tmp_path: Path
) -> None:
    """Served in float32, so that bfloat16 weights must arrive as what they are, exactly."""
    policy = PolicySide(wide_server.model_path, dtype)
    sidecar(wide_server)
    incarnation = {"float32": 3, "bfloat16": 4}[dtype]
    for number, mode in enumerate(("group", "disk", "delta", "group")):
        pusher = push(policy, mode=mode)
        for step in range(2 if mode == "delta" else 1):
            policy.perturb(10 * number + step)
            version = f"{incarnation}.{10 * number + step}"
            assert pusher.push([receiver(wide_server)], version) == {}
            assert_serves(wide_server, version, policy, tmp_path / f"{mode}-{number}-{step}")


def altered(bucket: Bucket, change: Callable[[str, torch.Tensor], None]) -> Bucket:
    """A copy of a bucket after ``change`` has been at each of its tensors."""
    wrong = bucket.data.clone()
    tensors, end = [], 0
    for name, tensor in bucket.tensors:
        end += tensor.nbytes
        tensors.append((name, wrong[end - tensor.nbytes : end].view(tensor.dtype).view(tensor.shape)))
        change(*tensors[-1])
    return Bucket(wrong, tensors)


def flip_last_bit_of_head(name: str, tensor: torch.Tensor) -> None:
    if name == "lm_head.weight":
        tensor.view(-1).view(torch.uint8)[-1] ^= 1


def mirror_right_half_of_down_projections(name: str, tensor: torch.Tensor) -> None:
    if name.startswith("model.layers.1.") and name.endswith(".down_proj.weight"):
        right = tensor.chunk(2, dim=1)[1]
        right.copy_(right.flip(1))


def test_what_one_of_two_ranks_holds_wrong_is_named_with_that_rank(
    wide_server: Server, world: Backend, push: Callable[..., WeightPusher], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    policy = PolicySide(wide_server.model_path)
    send = SourceLink.send
    monkeypatch.setattr(
        SourceLink, "send", lambda link, bucket: send(link, altered(bucket, mirror_right_half_of_down_projections))
    )
    wrong = {"llama": ["down_proj.weight"], "glm4_moe": ["experts.w2_weight", "shared_experts.down_proj.weight"]}
    named = ", ".join(f"model.layers.1.mlp.{name} (rank 1)" for name in wrong[policy.model.model_type])
    with pytest.raises(WeightMismatch, match=rf"{wide_server.engine.url}: {re.escape(named)}$"):
        push(policy).push([receiver(wide_server)], "5.7")
    monkeypatch.undo()
    assert push(policy).push([receiver(wide_server)], "5.8") == {}
    assert_serves(wide_server, "5.8", policy, tmp_path / "repaired")


@pytest.mark.parametrize("mode", ["group", "disk", "delta"])
def test_one_wrong_bit_on_the_way_stops_training_and_names_the_tensor(
    mode: str, second_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], sidecar,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    send, load = SourceLink.send, EngineControl.load

    def load_wrong(control: EngineControl, directory: Path, *arguments: Any) -> None:
        file = max(directory.glob("*.safetensors"))  # the last bucket, which ends in the head
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        load(control, directory, *arguments)

    pusher, version = push(mode=mode), f"5.{len(mode)}"
    if mode == "delta":
        copy = sidecar(second_server)
        assert pusher.push([receiver(second_server)], "5.1") == {}  # in full
    monkeypatch.setattr(SourceLink, "send", lambda link, bucket: send(link, altered(bucket, flip_last_bit_of_head)))
    monkeypatch.setattr(EngineControl, "load", load_wrong)
    with pytest.raises(WeightMismatch, match=rf"weights {version} .*{second_server.engine.url}: lm_head.weight$"):
        pusher.push([receiver(second_server)], version)
    assert mode != "delta" or copy.version == version, "a patched copy was loaded"
    monkeypatch.undo()
    pusher = push()
    assert pusher.push([receiver(second_server)], "5.9") == {}
    assert_serves(second_server, "5.9", moe, tmp_path / "repaired")


def test_in_place_shares_no_prefix_between_versions(
    second_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], tmp_path: Path
) -> None:
    """The prefix is cached under the old weights and stays cached; only its key keeps the new requests from it."""
    pusher = push(pause="in_place")
    assert pusher.push([receiver(second_server)], "6.0") == {}
    errors = {}
    for keyed in (True, False):
        prompt = [1 + (5 * i + keyed) % 20 for i in range(60)]
        moe.reset()
        assert pusher.push([receiver(second_server)], "6.0") == {}
        generate(at_version(second_server, "6.0"), [prompt], 2, share_by_version=keyed)
        moe.perturb(21)
        assert pusher.push([receiver(second_server)], "6.1") == {}
        (answer,) = generate(at_version(second_server, "6.1"), [prompt], 12, share_by_version=keyed)
        directory = moe.save(tmp_path / f"keyed-{keyed}")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        expected = reference(model, prompt + answer.token_ids)[len(prompt) - 1 :]
        errors[keyed] = np.abs(answer.logprobs - expected).max()
    assert errors[True] < 1e-5, "a stale prefix was shared"
    assert errors[False] > 1e-3, "this test would not see a stale prefix"


def at_version(server: Server, version: str) -> Server:
    """As the registry shows it when it serves ``version``."""
    return replace(server, engine=replace(server.engine, version=version))


class Interrupted:
    """A gatherer that does something after its first bucket."""

    def __init__(self, policy: PolicySide, action: Callable[[], None]) -> None:
        self._gatherer, self._action = policy.gatherer(), action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gatherer, name)

    def buckets(self) -> Iterator[Bucket | None]:
        for number, bucket in enumerate(self._gatherer.buckets()):
            if number == 1:
                self._action()
            yield bucket


def processes(server: Server) -> list[int]:
    own = psutil.Process(server.process.pid)
    return [own.pid, *(child.pid for child in own.children(recursive=True))]


def test_an_engine_that_hangs_in_mid_push_is_dropped_alone_and_readmitted_clean(
    glm4_moe_server: Server, second_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], tmp_path: Path
) -> None:
    def stop() -> None:
        for pid in processes(second_server):
            os.kill(pid, signal.SIGSTOP)

    moe.perturb(31)
    pusher = push(gatherer=Interrupted(moe, stop), timeout=15)
    both = [receiver(glm4_moe_server), receiver(second_server)]
    started = time.monotonic()
    try:
        failed = pusher.push(both, "7.1")
        assert time.monotonic() - started < 90
        assert set(failed) == {both[1].key}
        assert_serves(glm4_moe_server, "7.1", moe, tmp_path / "first")
        moe.perturb(32)
        failed = push(timeout=15).push([both[0], receiver(second_server, fresh=True)], "7.2")
        assert set(failed) == {both[1].key}, "still hanging"
    finally:
        for pid in processes(second_server):
            os.kill(pid, signal.SIGCONT)
    _wait_until_idle(second_server)
    moe.perturb(33)
    assert push().push([both[0], receiver(second_server, fresh=True)], "7.3") == {}
    for server in (glm4_moe_server, second_server):
        assert_serves(server, "7.3", moe, tmp_path / server.engine.id)


def _wait_until_idle(server: Server) -> None:
    """Calls that were made while it hung are still being answered."""
    deadline = time.monotonic() + 60
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            httpx.post(f"{server.engine.url}/continue_generation", json={}, headers=headers, timeout=2)
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            if httpx.post(f"{server.engine.url}/generate", json=body, headers=headers, timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"{server.engine.url} does not come back")


def two_ranks(server: Server, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [*torchrun, "-m", "tests.system.push_from_two_ranks", str(server.model_path), server.engine.url, str(out)]
    return subprocess.run([*script, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_two_source_ranks_push_and_one_killed_in_the_middle_leaves_an_engine_that_can_be_pushed_to(
    second_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], tmp_path: Path
) -> None:
    """Each of two ranks sends half of the bytes: also of experts that the other holds, and every checksum is verified;
    or of the experts only those that it holds."""
    for version, arguments in (("8.0", []), ("8.1", ["unverified"])):
        moe.reset()
        moe.perturb(43)
        assert push().push([receiver(second_server, fresh=True)], "7.9") == {}
        done = two_ranks(second_server, tmp_path / "weights", version, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        moe.reset()
        assert_serves(second_server, version, moe, tmp_path / version)
    killed = two_ranks(second_server, tmp_path / "weights", "8.2", "die")
    assert killed.returncode != 0 and "dies after its first bucket" in killed.stdout + killed.stderr
    moe.perturb(41)
    assert push().push([receiver(second_server, fresh=True)], "9.0") == {}
    assert_serves(second_server, "9.0", moe, tmp_path / "resumed")


def test_the_tool_tells_what_differs_pushes_a_directory_and_verifies_it(
    second_server: Server, moe: PolicySide, tmp_path: Path
) -> None:
    moe.reset()
    moe.perturb(61)
    directory = moe.save(tmp_path / "model")
    moe.reset()
    engine = ["--hf", str(directory), "--engine", second_server.engine.url, "--dtype", "float32"]

    def tool(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "tools/reshard_weights.py", command, *engine, *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)

    before = tool("verify")
    assert before.returncode == 1 and "model.layers.1.mlp.experts.w13_weight" in before.stdout
    pushed = tool("push", "--version", "9.1")
    assert pushed.returncode == 0, pushed.stderr
    after = tool("verify")
    assert after.returncode == 0 and f"holds {directory}" in after.stdout, after.stdout + after.stderr


def test_an_engine_that_is_killed_in_mid_push_is_dropped_alone(
    glm4_moe_server: Server, second_server: Server, moe: PolicySide, push: Callable[..., WeightPusher], tmp_path: Path
) -> None:
    """Last, since it ends the second server."""
    moe.perturb(51)
    pusher = push(gatherer=Interrupted(moe, second_server.process.kill), timeout=20)
    failed = pusher.push([receiver(glm4_moe_server), receiver(second_server)], "10.1")
    assert set(failed) == {receiver(second_server).key}
    assert_serves(glm4_moe_server, "10.1", moe, tmp_path / "alive")
