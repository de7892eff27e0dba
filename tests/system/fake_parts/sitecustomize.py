"""On PYTHONPATH this replaces the parts that the launcher starts by stand-ins; the command line stays the real one.

FAKE_<PART> holds the words that say what the part does, FAKE_PIDS is a folder that gets a file per process,
FAKE_PACKAGES names the packages to replace (default: all), FAKE_AFTER the parts without which none succeeds. On the
node FAKE_BAD_NODE another torch seems installed.
"""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path


def part(name: str):
    def main(*_arguments: object) -> int:
        Path(os.environ["FAKE_PIDS"], f"{name}.{os.getpid()}").touch()
        others = os.environ.get("FAKE_AFTER", "").split()
        for word in os.environ.get(f"FAKE_{name.upper()}", "sleep").split():
            if word == "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            elif word == "detach":
                child = subprocess.Popen(
                    [sys.executable, "-Sc", "import time; time.sleep(300)"], start_new_session=True
                )
                Path(os.environ["FAKE_PIDS"], f"{name}-child.{child.pid}").touch()
            elif word == "fail":
                raise ArithmeticError(f"the {name} has had enough")
            elif word == "misconfigured":
                from megatron_sao.config import ConfigError

                raise ConfigError(f"the {name} cannot run this")
            elif word == "stoppable":
                for number in (signal.SIGUSR1, signal.SIGTERM):
                    signal.signal(number, lambda *_: os._exit(75))
            elif word == "succeed":
                time.sleep(1)
                while not all(list(Path(os.environ["FAKE_PIDS"]).glob(f"{part}.*")) for part in others):
                    time.sleep(0.05)
                return 0
        time.sleep(300)
        return 0

    return types.SimpleNamespace(main=main)


if os.environ.get("FAKE_BAD_NODE", "none") == os.environ.get("SLURMD_NODENAME"):
    import importlib.metadata

    installed = importlib.metadata.version
    importlib.metadata.version = lambda package: "0.0.1" if package == "torch" else installed(package)

if "FAKE_PIDS" in os.environ:
    packages = {
        "buffer": {"server": "buffer"},
        "rollout": {"worker": "worker", "engine": "engine"},
        "trainer": {"main": "trainer"},
    }
    for package in os.environ.get("FAKE_PACKAGES", "buffer rollout trainer").split():
        modules = packages[package]
        stand_in = types.ModuleType(f"megatron_sao.{package}")
        for module, name in modules.items():
            setattr(stand_in, module, part(name))
        sys.modules[stand_in.__name__] = stand_in
        if package == "rollout":  # whose environments the launcher looks for
            loading = types.SimpleNamespace(load_object=lambda _path, _field: None)
            sys.modules[f"{stand_in.__name__}.loading"] = loading
