"""``megatron-sao doctor``: whether this machine can run the system, as a table; exit code 1 when a needed part cannot.

Every check is a function that returns (state, detail). "warn" is for what matters to some runs only.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from megatron_sao.config import ConfigError, RunConfig, parse_config
from megatron_sao.launch import local
from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import SupervisedProcess

Result = tuple[Literal["ok", "warn", "FAIL"], str]
ROOT = Path(__file__).parents[1]
MIN_DRIVER = 580  # CUDA 13
IMPORT_SECONDS = 600.0  # the first import after an installation compiles some ten thousand files

_ALL_REDUCE = """
import sys, torch, torch.distributed as dist
backend, rank, world, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
value = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(value)
assert value.item() == world, value
dist.destroy_process_group()
"""


def main(config: RunConfig | None = None, serve: bool = False) -> int:
    """Print the table; returns 1 when something needed is broken.

    Args:
        config: also check this run's model directory, data files and ports.
        serve: also start a real SGLang server on a tiny random model.
    """
    checks: list[tuple[str, Callable[[], Result]]] = [
        ("python", check_python),
        ("pinned versions", check_pins),
        ("apex", check_apex),
        ("memory", check_memory),
        ("disk", check_disk),
        ("loopback ports", check_loopback),
        ("GPU", check_gpu),
        ("gloo all-reduce", lambda: check_all_reduce("gloo", 2)),
    ]
    if gpus := len(local.visible_gpus()):
        checks += [
            ("driver", check_driver),
            ("GPU arithmetic", check_gpu_arithmetic),
            ("NCCL all-reduce", lambda: check_all_reduce("nccl", gpus)),
            ("TransformerEngine", check_transformer_engine),
        ]
    checks.append(("SGLang imports", check_sglang_imports))
    if serve:
        checks.append(("SGLang serves", check_sglang_serves))
    if config is not None:
        checks.append(("run config", lambda: check_config(config)))
    broken = 0
    for name, check in checks:
        state, detail = check()
        broken += state == "FAIL"
        print(f"{state:5} {name:16} {detail}", flush=True)
    return 1 if broken else 0


def check_python() -> Result:
    version = ".".join(map(str, sys.version_info[:3]))
    return ("ok" if sys.version_info[:2] in ((3, 12), (3, 13)) else "FAIL"), f"{version}; 3.12 and 3.13 are supported"


def check_pins() -> Result:
    """Installed versions against requirements.txt, or against the CPU set where there is no GPU."""
    pins = ROOT / ("requirements.txt" if local.visible_gpus() else "tools/setup/requirements-cpu.txt")
    if not pins.is_file():
        return "warn", f"{pins} is not there (installed without the checkout), so there is nothing to compare with"
    lines = [line for line in pins.read_text().splitlines() if line and not line.startswith("#")]
    return compare_pins([Requirement(line) for line in lines])


def compare_pins(pins: list[Requirement]) -> Result:
    """FAIL when a package is missing or differs; transformer-engine may be missing."""
    wrong = []
    for pin in pins:
        if pin.marker and not pin.marker.evaluate():
            continue
        try:
            installed = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            if not pin.name.startswith("transformer-engine"):
                wrong.append(f"{pin.name} is missing")
            continue
        if not pin.specifier.contains(installed, prereleases=True):
            wrong.append(f"{pin.name} is {installed}, pinned {pin.specifier}")
    if wrong:
        return "FAIL", f"{'; '.join(wrong[:8])}{' …' * (len(wrong) > 8)}; run `make setup`"
    return "ok", f"all {len(pins)} pins"


def check_apex() -> Result:
    """NVIDIA's apex says so in its summary; the package of that name on the package index is something else."""
    try:
        found = importlib.metadata.distribution("apex")
    except importlib.metadata.PackageNotFoundError:
        return "ok", "not installed (optional)"
    if "nvidia" in (found.metadata["Summary"] or "").lower():
        return "ok", f"NVIDIA's, version {found.version}"
    return "FAIL", f"apex {found.version} is not NVIDIA's but an unrelated package; run `pip uninstall apex`"


def check_memory() -> Result:
    free = psutil.virtual_memory().available / 1e9
    return ("ok" if free >= 8 else "warn"), f"{free:.1f} GB available; the CPU demo takes about 8 GB"


def check_disk() -> Result:
    free = shutil.disk_usage(Path.cwd()).free
    return ("ok" if free >= local.MIN_FREE_BYTES else "FAIL"), f"{free / 1e9:.1f} GB free in {Path.cwd()}"


def check_loopback() -> Result:
    """A connection over 127.0.0.1, as between the processes of a run."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return "ok", "127.0.0.1 accepts connections"
    except OSError as error:
        return "FAIL", f"no connection over 127.0.0.1: {error}"


def check_gpu() -> Result:
    import torch

    devices = local.visible_gpus()
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return "ok", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}, CUDA {torch.version.cuda}"
    if devices:
        return "FAIL", f"device files of {len(devices)} GPUs exist, but torch {torch.__version__} cannot use them"
    return "ok", "none: everything runs on the CPU backend"


def check_driver() -> Result:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        version = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return "warn", f"nvidia-smi does not tell the driver's version: {error}"
    good = int(version.partition(".")[0]) >= MIN_DRIVER
    return ("ok" if good else "FAIL"), f"{version}; CUDA 13 needs {MIN_DRIVER} or newer"


def check_gpu_arithmetic() -> Result:
    """A bfloat16 product on every GPU against the CPU's."""
    import torch

    torch.manual_seed(0)
    left, right = (torch.randn(512, 512, dtype=torch.bfloat16) for _ in range(2))
    expected = left.double() @ right.double()
    for device in range(torch.cuda.device_count()):
        found = (left.to(device) @ right.to(device)).cpu().double()
        if (found - expected).abs().max() > 0.01 * expected.abs().max():
            return "FAIL", f"GPU {device} multiplies wrongly: largest difference {(found - expected).abs().max():.3g}"
    return "ok", f"bfloat16 products on {torch.cuda.device_count()} GPUs agree with the CPU's"


def check_transformer_engine() -> Result:
    """A layer on the first GPU; only `model.layers: transformer_engine` needs it."""
    code = (
        "import torch, transformer_engine.pytorch as te; "
        "layer = te.LayerNormLinear(64, 64, params_dtype=torch.bfloat16).cuda(); "
        "assert layer(torch.randn(8, 64, dtype=torch.bfloat16, device='cuda')).isfinite().all()"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "FAIL", f"no answer within {IMPORT_SECONDS:.0f} s"
    if done.returncode:
        return "warn", f"layers: transformer_engine cannot be used: {last_line(done.stderr)}"
    return "ok", f"version {importlib.metadata.version('transformer-engine')}"


def check_all_reduce(backend: str, ranks: int) -> Result:
    """One all-reduce between ``ranks`` processes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _ALL_REDUCE, backend]
        tails = [str(ranks), f"{folder}/store"]
        with (Path(folder) / "output").open("w+") as output:
            processes = [
                subprocess.Popen([*command, str(rank), *tails], stdout=output, stderr=output) for rank in range(ranks)
            ]
            try:
                codes = [process.wait(IMPORT_SECONDS) for process in processes]
            except subprocess.TimeoutExpired:
                return "FAIL", f"{ranks} ranks did not finish within {IMPORT_SECONDS:.0f} s"
            finally:
                for process in processes:
                    process.kill()
            output.seek(0)
            if any(codes):
                return "FAIL", last_line(output.read())
    return "ok", f"{ranks} ranks, {time.monotonic() - began:.1f} s with imports"


def check_sglang_imports() -> Result:
    """Whether the server's modules load, with what this machine needs for that on the path."""
    from megatron_sao.rollout.sglang_backend import sglang_command

    with tempfile.TemporaryDirectory() as folder:
        _, env = sglang_command(_tiny_config(Path(folder)), 1, Path(folder), "0.0")
    command = [sys.executable, "-c", "import sglang.srt.entrypoints.http_server"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "FAIL", f"not loaded within {IMPORT_SECONDS:.0f} s; free the CPU and try again"
    if done.returncode:
        return "FAIL", last_line(done.stderr)
    return "ok", f"sglang {importlib.metadata.version('sglang')}"


def check_sglang_serves() -> Result:
    """Start the server that a run would start, on a random two-layer model, and let it generate a token."""
    import asyncio

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    from megatron_sao.rollout.sglang_backend import ServerFailed, sglang_command, wait_until_serving

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        logging.disable_progress_bar()
        shape = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        LlamaForCausalLM(shape).save_pretrained(folder)
        config = _tiny_config(folder)
        reserved = reserve_port("127.0.0.1")
        port = port_of(reserved)
        os.environ.setdefault("MEGATRON_SAO_TOKEN", "doctor")
        argv, env = sglang_command(config, port, folder, "0.0")
        server = SupervisedProcess("sglang", argv, env, folder)
        began = time.monotonic()
        server.start()
        try:
            token = os.environ["MEGATRON_SAO_TOKEN"]
            url = f"http://127.0.0.1:{port}"
            asyncio.run(wait_until_serving(server, url, token, "0.0", config.engine.start_timeout))
        except ServerFailed as error:
            return "FAIL", str(error)
        finally:
            server.kill()
            reserved.close()
    return "ok", f"generated a token {time.monotonic() - began:.0f} s after the start"


def check_config(config: RunConfig) -> Result:
    """What `megatron-sao run` checks before it starts anything."""
    try:
        local.check_inputs(config)
        local.choose_ports(config)
    except ConfigError as error:
        return "FAIL", str(error)
    return "ok", f"{config.name}: model directory, data files and ports"


def _tiny_config(model: Path) -> RunConfig:
    rollout = {"environment": "none:None", "concurrency": 1, "max_tokens": 64}
    return parse_config({"name": "doctor", "model": {"path": model}, "data": {"train": model}, "rollout": rollout})


def last_line(text: str) -> str:
    """The last line with anything on it: where Python puts the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
