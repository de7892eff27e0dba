"""The engine sidecar around a server of a few lines, and the command line of the real one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_sao.buffer.client import EngineInfo
from megatron_sao.config import ConfigError, EngineConfig
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess
from megatron_sao.rollout import engine as sidecar
from megatron_sao.rollout import health
from megatron_sao.rollout.sglang_backend import ServerFailed, sglang_command, wait_until_serving
from megatron_sao.rollout.sglang_server import drop_torn_libraries
from tests.serving import eventually, run_config

SERVER = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.dumps({"meta_info": {"weight_version": sys.argv[2]}}).encode()
        self.send_response(200), self.send_header("content-length", str(len(body))), self.end_headers()
        self.wfile.write(body)
    def do_GET(self):  # /health_generate
        hung = os.path.exists("hung")
        self.send_response(503 if hung else 200), self.send_header("content-length", "0"), self.end_headers()
    def log_message(self, *arguments): pass
print("listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeRegistry:
    def __init__(self) -> None:
        self.registered: list[str] = []
        self.heartbeats = 0
        self.state = "dirty"
        self.url: str | None = None  # of another sidecar that has registered since
        self.sick: list[str | None] = []

    async def register_engine(self, id: str, url: str, tp: int) -> None:
        self.registered.append(url)

    async def heartbeat_engine(self, id: str, sick: str | None) -> EngineInfo:
        self.heartbeats += 1
        self.sick.append(sick)
        return EngineInfo(id, self.url or self.registered[-1], self.state, None, 1, 0.0)

    async def close(self) -> None: ...


@pytest.fixture
def make_sidecar(tmp_path, monkeypatch):
    """A sidecar whose server is a few lines of http.server, and whose buffer is a FakeRegistry."""
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", "token")
    monkeypatch.setenv("MEGATRON_SAO_BUFFER", "http://127.0.0.1:9")

    def make(code: str, weights: dict[str, Any] | None = None, **engine: Any) -> tuple[sidecar.Sidecar, FakeRegistry]:
        command = lambda config, port, model, version: ([sys.executable, "-c", code, str(port), version], {})  # noqa: E731
        monkeypatch.setattr(sidecar, "sglang_command", command)
        settings = run_config(tmp_path, engine=engine, weights=weights or {})
        made = sidecar.Sidecar(settings, tmp_path, 0, 0)
        made._buffer = FakeRegistry()
        return made, made._buffer

    return make


def child_of_this_test() -> psutil.Process | None:
    for child in psutil.Process().children():  # of earlier tests, too, and they may end meanwhile
        with contextlib.suppress(psutil.NoSuchProcess):
            if "http.server" in " ".join(child.cmdline()):
                return child
    return None


def test_the_sidecar_registers_its_server_and_registers_again_what_it_had_to_restart(make_sidecar):
    made, registry = make_sidecar(SERVER)

    async def run() -> None:
        task = asyncio.create_task(made.run())
        await eventually(lambda: len(registry.registered) == 1 and registry.heartbeats)
        child_of_this_test().kill()
        await eventually(lambda: len(registry.registered) == 2)
        assert registry.registered[0] != registry.registered[1]
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert child_of_this_test() is None


def test_the_sidecar_says_that_its_server_gives_no_tokens_unless_its_weights_are_being_updated(
    make_sidecar, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where the server looks for the file "hung"
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(sidecar, "HEARTBEAT_SECONDS", 0.02)
    made, registry = make_sidecar(SERVER)

    async def run() -> None:
        task = asyncio.create_task(made.run())
        (tmp_path / "hung").touch()
        await eventually(lambda: registry.heartbeats > 20)
        assert set(registry.sick) == {None}  # it is dirty
        registry.state = "clean"
        await eventually(lambda: registry.sick[-1] is not None)
        assert registry.sick[-1] == "it gave no token within engine.health_timeout = 30 s (HTTP 503)"
        registry.state = "sick"
        (tmp_path / "hung").unlink()
        await eventually(lambda: registry.sick[-1] is None)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def test_what_a_probe_found_while_an_update_came_in_between_is_not_believed(monkeypatch):
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.01)
    probe = health.HealthProbe("http://engine", "token", 30)
    probe.heed("clean")
    believed = []  # at the beginning of each probe

    async def ask(_) -> str:
        believed.append(probe.sick)
        if len(believed) == 1:
            probe.heed("dirty")  # an update, from beginning to end
            probe.heed("clean")
        return "no token"

    async def run() -> None:
        probing = asyncio.create_task(probe.run())
        await eventually(lambda: len(believed) >= 3)  # other probes may follow before this looks
        probing.cancel()

    monkeypatch.setattr(probe, "_ask", ask)
    asyncio.run(run())
    assert believed[:3] == [None, None, "no token"]


def test_the_sidecar_gives_up_after_its_restarts_with_the_servers_last_words(make_sidecar):
    made, registry = make_sidecar("import sys; print('out of memory'); sys.exit(3)", max_restarts=2)
    with pytest.raises(ServerFailed, match=r"(?s)max_restarts = 2 .*exit code 3.*out of memory"):
        asyncio.run(made.run())
    assert registry.registered == []


def test_a_sidecar_whose_engine_another_has_registered_ends(make_sidecar):
    made, registry = make_sidecar(SERVER)
    registry.url = "http://10.0.0.2:30000"
    with pytest.raises(
        ConfigError, match=r"engine-0 is now the one at http://10.0.0.2:30000: no two sidecars may share"
    ):
        asyncio.run(made.run())
    assert child_of_this_test() is None


def test_under_delta_the_sidecar_follows_published_versions_with_a_copy(make_sidecar, tmp_path, caplog):
    made, _ = make_sidecar(SERVER, weights={"mode": "delta"})
    published = tmp_path / "weights" / "full" / "1.0"
    published.mkdir(parents=True)
    (published / "config.json").write_text("{}")
    latest = tmp_path / "weights" / "latest.json"
    latest.write_text('{"vers')  # as a file system in trouble might show it
    report = tmp_path / "weights" / "engines" / "engine-0.json"

    async def run() -> dict[str, Any]:
        task = asyncio.create_task(made.run())
        await eventually(lambda: "could not look after its copy" in caplog.text, seconds=60)  # Megatron is imported
        latest.write_text('{"version": "1.0"}')
        await eventually(report.exists)
        task.cancel()
        await asyncio.wait([task])
        return json.loads(report.read_text())

    said = asyncio.run(run())
    assert said["version"] == "1.0" and (Path(said["path"]) / "config.json").exists()


def test_a_server_that_is_another_ones_is_not_taken_for_ours(tmp_path):
    reserved = reserve_port("127.0.0.1")
    port = port_of(reserved)
    server = SupervisedProcess("other", [sys.executable, "-c", SERVER, str(port), "7.7"], {}, tmp_path)
    server.start()
    try:
        with pytest.raises(ServerFailed, match=r"serves weights '7.7', not '0.0'"):
            asyncio.run(wait_until_serving(server, f"http://127.0.0.1:{port}", "token", "0.0", timeout=90))
    finally:
        server.kill()


def test_the_users_sglang_flags_override_ours_and_the_token_is_not_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_SAO_TOKEN", "secret-token")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    flags = {"mem_fraction_static": 0.5, "sleep_on_idle": False, "lora_paths": ["a", "b"]}
    flags |= {"chat_template": "-a.jinja", "enable_metrics": True}
    settings = run_config(tmp_path, engine={"sglang": flags})
    argv, env = sglang_command(settings, 1234, tmp_path, "0.0")
    line = " ".join(argv)
    assert "--mem-fraction-static 0.5" in line and line.count("--mem-fraction-static") == 1
    assert "--sleep-on-idle" not in line and "--lora-paths a b" in line and line.endswith("--enable-metrics")
    assert "--chat-template=-a.jinja" in argv  # else it would be a flag of its own
    assert env["no_proxy"] == env["NO_PROXY"] == "example.org,127.0.0.1,localhost,127.0.0.1"  # it asks itself
    assert "--device cpu" in line and "cpu_stub" in env["PYTHONPATH"] and "secret-token" not in line
    on_gpu = settings.model_copy(update={"model": settings.model.model_copy(update={"device": "cuda"})})
    argv, env = sglang_command(on_gpu, 1234, tmp_path, "0.0")
    assert "--device" not in argv and "SGLANG_USE_CPU_ENGINE" not in env
    reserved = settings.model_copy(update={"engine": EngineConfig(sglang={"api_key": "x"})})
    with pytest.raises(ConfigError, match=r"engine.sglang.api_key is set by the run itself"):
        sglang_command(reserved, 1234, tmp_path, "0.0")


def test_a_child_of_a_server_on_a_cpu_loads_nothing_of_sglang_for_routing_that_is_not_asked_for() -> None:
    """As multiprocessing imports the main module; tests/system/test_engine_routing.py asks for the routing."""
    child = (
        "import runpy, sys; runpy.run_module('megatron_sao.rollout.sglang_server', run_name='__mp_main__'); "
        "print([name for name in sys.modules if name.startswith('sglang')])"
    )
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", child, "--device", "cpu"], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_compiled_library_that_a_crash_left_incomplete_is_deleted_and_whole_or_new_ones_stay(tmp_path: Path) -> None:
    whole = Path(importlib.util.find_spec("_ctypes").origin).read_bytes()
    contents = {"whole": whole, "empty": b"", "cut": whole[:-1], "zeros": bytes(len(whole))}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.so").write_bytes(content)
        os.utime(tmp_path / name / "kernel.so", (0, 0))
    (tmp_path / "being_written.so").write_bytes(whole[:1000])

    dropped = {path.parent.name for path in drop_torn_libraries(tmp_path)}

    assert dropped == {"empty", "cut", "zeros"}
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.so")) == [
        "being_written.so",
        "whole/kernel.so",
    ]
