"""Ports that are chosen a minute before a server listens on them, and a server that cannot listen."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_sao.buffer.server import listen
from megatron_sao.launch.ports import port_of, reserve_port

IP_LOCAL_PORT_RANGE = 51  # Linux 6.3: the range that a socket's free port comes from

# Stands for SGLang's modules: a server that cannot listen, and its warm-up thread.
SGLANG = {
    "srt/environ": "def third_party_cache_defaults(): return {'TORCHINDUCTOR_CACHE_DIR': '/nowhere'}\n",
    "__init__": "",
    "srt/__init__": "",
    "launch_server": """
import sys, threading, time
def run_server(arguments):
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("address already in use", file=sys.stderr)
    sys.exit(1)
""",
    "srt/plugins": "load_plugins = lambda: None",
    "srt/server_args": "prepare_server_args = list",
    "srt/utils": "kill_process_tree = lambda pid, include_parent: None",
}


def bind_within(port: int) -> socket.socket:
    """A socket bound to any free port of the range that holds just ``port``."""
    seeker = socket.socket()
    seeker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        seeker.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    except OSError:
        pytest.skip("this kernel cannot narrow the range of free ports (needs Linux 6.3)")
    seeker.bind(("127.0.0.1", 0))
    return seeker


def test_a_reserved_port_is_given_to_nobody_who_asks_for_a_free_one():
    with reserve_port("127.0.0.1") as reserved:
        port = port_of(reserved)
        with pytest.raises(OSError, match="in use"):
            bind_within(port)
    with bind_within(port) as seeker:  # as it would have been
        assert seeker.getsockname()[1] == port


def test_a_server_that_names_a_reserved_port_listens_there_and_again_after_a_restart():
    with reserve_port("127.0.0.1") as reserved:
        for _ in range(2):
            server = socket.create_server(("127.0.0.1", port_of(reserved)))
            with server, socket.create_connection(server.getsockname(), timeout=5) as connection:
                assert connection.getpeername() == ("127.0.0.1", port_of(reserved))


def test_a_port_that_somebody_listens_on_cannot_be_reserved():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        reserve_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"url": "http://127.0.0.1:"}'])
def test_a_buffer_whose_last_address_cannot_be_read_takes_any_port(tmp_path, text):
    (tmp_path / "buffer.json").write_text(text)
    with listen("127.0.0.1", 0, tmp_path / "buffer.json") as reserved:
        assert port_of(reserved)


def test_a_server_that_cannot_listen_ends_at_once_although_its_threads_go_on(tmp_path):
    for name, code in SGLANG.items():
        module = tmp_path / "sglang" / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(code)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    server = subprocess.run(
        [sys.executable, "-m", "megatron_sao.rollout.sglang_server"],
        env=os.environ | {"PYTHONPATH": path, "MEGATRON_SAO_TOKEN": "token"},
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )
    assert server.returncode == 1
    assert server.stderr.splitlines()[-1] == "address already in use"
