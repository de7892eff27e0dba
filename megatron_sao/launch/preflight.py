"""Checks on every node of a job, side by side, before anything costs time.

``check_nodes``, on the batch node, starts this module as one task per node and names the nodes that fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "megatron-sao")
CLOCK_SECONDS = 5.0  # that a node's clock may differ from the others' median
GRACE_SECONDS = 3.0  # for the other nodes' reports, once one has failed
REDUCED_FLOATS = 16 * 2**20


class PreflightFailed(RuntimeError):
    """A node cannot take part; the message names each such node, which are also ``nodes``, and why."""

    def __init__(self, message: str, nodes: list[str]) -> None:
        super().__init__(message)
        self.nodes = nodes


class Problem(NamedTuple):
    """``node`` is None where it is not known which node is to blame."""

    node: str | None
    what: str

    def __str__(self) -> str:
        return f"node {self.node}: {self.what}" if self.node else self.what


@dataclass(frozen=True)
class Place:
    """What a node must offer: the address that Slurm has for it, free ports there, GPUs (0: it needs none)."""

    address: str
    ports: list[int]
    gpus: int


@dataclass(frozen=True)
class Plan:
    """What is checked.

    Attributes:
        nodes: by name; the first one has ``port`` free for the all-reduce, and the port after it.
        files: that must be there, the same everywhere; a directory stands for the files in it.
        interface: the network interface to use; None: the one with the node's address.
        scratch: a directory to make on each node.
        cuda: whether GPUs are a must; otherwise a node where torch sees none is checked as a CPU node.
        seconds: for everything.
    """

    nodes: dict[str, Place]
    files: list[str]
    interface: str | None
    scratch: str | None
    port: int
    cuda: bool
    seconds: float
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))  # tells this check's files from an earlier one's

    @staticmethod
    def read(path: Path) -> Plan:
        raw = json.loads(path.read_text())
        return Plan(**raw | {"nodes": {name: Place(**place) for name, place in raw["nodes"].items()}})


@dataclass(frozen=True)
class Report:
    """What a good node says: the address and the interface on which the others reach it."""

    address: str
    interface: str | None


def check_nodes(
    folder: Path, plan: Plan, commands: Callable[[list[str]], list[list[str]]], env: dict[str, str]
) -> dict[str, Report]:
    """Check all nodes at once.

    Args:
        folder: for the checks' own files, removed when all is well; on the file system that the run is on.
        commands: from the arguments of an interpreter to the steps that call it once on each node.
        env: of those steps.

    Raises:
        PreflightFailed: naming the nodes.
    """
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    arguments = ["-m", "megatron_sao.launch.preflight", str(folder.absolute())]
    reports, output = _gather(commands(arguments), env, list(plan.nodes), plan.seconds)
    problems = list(_problems(reports, folder, plan))
    if problems:
        silent = output and len(reports) < len(plan.nodes)
        message = "\n".join(map(str, problems)) + (f"\nfrom the nodes' steps:\n{output}" if silent else "")
        raise PreflightFailed(message, sorted({problem.node for problem in problems if problem.node}))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return {name: Report(report["address"], report["interface"]) for name, report in reports.items()}


def _gather(
    commands: list[list[str]], env: dict[str, str], names: list[str], seconds: float
) -> tuple[dict[str, dict[str, Any]], str]:
    """The reports, and what else was printed. Ends when all nodes are done, one has failed, or the time is up."""
    steps = [
        subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    lines: list[str] = []
    readers = [threading.Thread(target=_read, args=(step, lines), daemon=True) for step in steps]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + seconds
    while any(step.poll() is None for step in steps) and time.monotonic() < deadline:
        reports, _ = _parse(lines)
        if any(report["problems"] for report in reports.values()) or any(step.poll() for step in steps):
            deadline = min(deadline, time.monotonic() + (GRACE_SECONDS if len(reports) < len(names) else 0.0))
        time.sleep(0.1)
    for step in steps:
        step.terminate()
    for step, reader in zip(steps, readers, strict=True):
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(5.0)
        step.kill()
        reader.join(1.0)
    return _parse(lines)


def _read(step: subprocess.Popen[str], lines: list[str]) -> None:
    for line in step.stdout:
        lines.append(line)


def _parse(lines: list[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Each node's last report; and the lines that are none."""
    reports: dict[str, dict[str, Any]] = {}
    other = []
    for line in list(lines):
        _, mark, text = line.partition("PREFLIGHT ")
        if mark:
            report = json.loads(text)
            reports[report["node"]] = report
        else:
            other.append(line.rstrip())
    return reports, "\n".join(other[-20:])


def _problems(reports: dict[str, dict[str, Any]], folder: Path, plan: Plan) -> Iterator[Problem]:
    failed = {name for name, report in reports.items() if report["problems"]}
    for name in sorted(failed):
        yield from (Problem(name, problem) for problem in reports[name]["problems"])
    for kind in ("versions", "files"):
        yield from _odd_ones(kind, {name: report[kind] for name, report in reports.items()})
    for name in reports:
        mark = folder / name
        if not mark.is_file() or mark.read_text() != plan.nonce:
            yield Problem(name, f"{folder} is not what this node sees there; it must be on a shared file system")
    if failed:  # the others could not go on without it
        return
    for name in plan.nodes:
        if name not in reports:
            yield Problem(name, f"it did not report, for which it had {plan.seconds:.0f} s (SAO_PREFLIGHT)")
        elif not reports[name]["done"]:
            yield Problem(name, f"it did not finish the all-reduce within {plan.seconds:.0f} s (SAO_PREFLIGHT)")


def _odd_ones(kind: str, found: dict[str, dict[str, str]]) -> Iterator[Problem]:
    """Nodes where a value differs from what most of those that have one have."""
    for key in sorted({key for values in found.values() for key in values}):
        there = {name: values[key] for name, values in found.items() if key in values}
        (usual, count), *others = Counter(there.values()).most_common()
        if others and others[0][1] == count:
            each = ", ".join(f"{value} on {name}" for name, value in sorted(there.items()))
            yield Problem(None, f"{kind} differ, and none is more frequent: {key} is {each}")
            continue
        for name, value in there.items():
            if value != usual:
                yield Problem(name, f"{kind} differ: {key} is {value} there and {usual} elsewhere")


def main(folder: Path) -> int:
    """One node's side: report on itself, then reduce with the others."""
    name = os.environ["SLURMD_NODENAME"]
    plan = Plan.read(folder / "plan.json")
    place = plan.nodes[name]
    report: dict[str, Any] = {"node": name, "problems": [], "done": False, "address": place.address, "interface": None}
    report |= {"versions": _versions(), "files": {}}
    for check in (_check_files, _check_folder, _check_network, _check_gpus):
        try:
            check(plan, place, folder, name, report)
        except OSError as error:
            report["problems"].append(str(error))
    _print(report)
    if report["problems"]:
        return 1
    try:
        _reduce(plan, name, report)
        report["done"] = not report["problems"]
    except Exception as error:  # whatever a broken installation raises is what the user must read
        report["problems"].append(f"all-reduce: {type(error).__name__}: {error}")
    _print(report)
    return 1 if report["problems"] else 0


def _print(report: dict[str, Any]) -> None:
    print(f"PREFLIGHT {json.dumps(report)}", flush=True)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _check_files(plan: Plan, place: Place, folder: Path, name: str, report: dict[str, Any]) -> None:
    """Names and sizes; contents would take too long."""
    for text in plan.files:
        path = Path(text)
        files = sorted(path.glob("*")) if path.is_dir() else [path]
        sizes = "".join(f"{file.name} {file.stat().st_size} " for file in files)  # a missing one raises
        if not files:
            report["problems"].append(f"{path} is empty")
        report["files"][text] = f"{len(files)} files, {hashlib.sha256(sizes.encode()).hexdigest()[:8]}"


def _check_folder(plan: Plan, place: Place, folder: Path, name: str, report: dict[str, Any]) -> None:
    with (folder / name).open("w") as file:
        file.write(plan.nonce)
        file.flush()
        os.fsync(file.fileno())
    if plan.scratch:
        Path(plan.scratch).mkdir(parents=True, exist_ok=True)


def _check_network(plan: Plan, place: Place, folder: Path, name: str, report: dict[str, Any]) -> None:
    addresses = {
        interface: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for interface, entries in psutil.net_if_addrs().items()
    }
    if plan.interface:
        if not addresses.get(plan.interface):
            there = ", ".join(interface for interface, found in addresses.items() if found)
            report["problems"].append(f"SAO_INTERFACE = {plan.interface} has no IPv4 address; there are {there}")
            return
        address = addresses[plan.interface][0]
    else:
        try:
            address = socket.gethostbyname(place.address)
        except OSError:  # the name means nothing here: then the address from which this node reaches the batch node
            address = _address_towards(os.environ["SLURM_LAUNCH_NODE_IPADDR"])
    report["address"] = address
    loopback = address.startswith("127.")  # every address of 127.0.0.0/8 is the loopback interface's
    owners = [
        interface for interface, found in addresses.items() if address in found or (loopback and "127.0.0.1" in found)
    ]
    report["interface"] = owners[0] if owners else None
    for port in place.ports:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(1)
            except OSError as error:
                report["problems"].append(f"cannot listen on {address}:{port} ({error.strerror}): stop what uses it")


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _check_gpus(plan: Plan, place: Place, folder: Path, name: str, report: dict[str, Any]) -> None:
    if not place.gpus:
        return
    import torch

    found = torch.cuda.device_count()
    report["versions"]["GPUs"] = f"{found} × {torch.cuda.get_device_name()}" if found else "none"
    if found < place.gpus and (found or plan.cuda):
        report["problems"].append(f"torch sees {found} GPUs of {place.gpus}")
    for device in range(found):
        free, total = torch.cuda.mem_get_info(device)
        if free < 0.9 * total:
            report["problems"].append(
                f"GPU {device} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free: somebody uses it"
            )


def _reduce(plan: Plan, name: str, report: dict[str, Any]) -> None:
    """Between all nodes over gloo, which also compares their clocks; then between all GPUs over NCCL."""
    import torch
    import torch.distributed as dist

    names = list(plan.nodes)
    master = plan.nodes[names[0]].address if name != names[0] else report["address"]
    if report["interface"]:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", report["interface"])
    _join("gloo", master, plan.port, names.index(name), len(names), plan.seconds)
    clocks = torch.zeros(len(names), dtype=torch.float64)
    dist.barrier()
    clocks[names.index(name)] = time.time()
    dist.all_reduce(clocks)
    ahead = float(clocks[names.index(name)] - clocks.median())
    if abs(ahead) > CLOCK_SECONDS:
        report["problems"].append(f"its clock is {ahead:+.0f} s off the other nodes'; check its time service")
    dist.barrier()
    dist.destroy_process_group()
    if report["versions"].get("GPUs", "none") != "none":
        _reduce_gpus(plan, names, name, master, report)


def _reduce_gpus(plan: Plan, names: list[str], name: str, master: str, report: dict[str, Any]) -> None:
    """One process per GPU."""
    gpus = [plan.nodes[other].gpus for other in names]
    first, world = sum(gpus[: names.index(name)]), sum(gpus)
    command = [sys.executable, "-m", "megatron_sao.launch.preflight", "rank"]
    arguments = [master, str(plan.port + 1), str(world), str(plan.seconds)]
    ranks = [
        subprocess.Popen(
            [*command, str(first + device), str(device), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for device in range(plan.nodes[name].gpus)
    ]  # fmt: skip
    for device, rank in enumerate(ranks):
        output, _ = rank.communicate()
        if rank.returncode:
            last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
            report["problems"].append(f"NCCL all-reduce on GPU {device}: {last}")


def _reduce_on_gpu(rank: int, device: int, master: str, port: int, world: int, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(device)
    _join("nccl", master, port, rank, world, seconds)
    values = torch.ones(REDUCED_FLOATS, device="cuda")
    dist.all_reduce(values)
    if not bool((values == world).all()):
        raise RuntimeError(f"the sum over {world} GPUs is wrong")
    dist.destroy_process_group()


def _join(backend: str, master: str, port: int, rank: int, world: int, seconds: float) -> None:
    import datetime

    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, f"tcp://{master}:{port}", timeout, world_size=world, rank=rank)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_, device_, master_, port_, world_, seconds_ = sys.argv[2:]
        _reduce_on_gpu(int(rank_), int(device_), master_, int(port_), int(world_), float(seconds_))
    else:
        sys.exit(main(Path(sys.argv[1])))
