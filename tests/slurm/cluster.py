"""A Slurm cluster of four nodes in this machine: munge, slurmctld and four slurmd in a temporary directory, without
systemd. The nodes have addresses of their own (127.0.0.2 …), names that nothing resolves, and four pretended GPUs."""

from __future__ import annotations

import getpass
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_sao.launch.ports import port_of, reserve_port
from megatron_sao.launch.process import die_with_parent

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
CPUS = 8

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=1
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=15
InactiveLimit=0
MinJobAge=3600
FirstJobId={first_job}
GresTypes=gpu
PartitionName=test Nodes=n[1-4] Default=YES MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


class Cluster:
    """Started by ``with``; ``env`` is what Slurm's commands need."""

    def __init__(self) -> None:
        # Not below pytest's own directory: munge wants to see that everybody could reach its socket.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.env = os.environ | {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        self.root.chmod(0o711)
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._configure()
        files = {name: str(self.root / f"munge.{name}") for name in ("socket", "seed")}
        files["pid"] = str(self.root / "munged.pid")
        self._start("munged", "--foreground", f"--key-file={key}", f"--socket={files['socket']}",
                    f"--seed-file={files['seed']}", f"--pid-file={files['pid']}", "--num-threads=2")  # fmt: skip
        self.wait_for(lambda: Path(files["socket"]).exists(), 60, "munge")
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self.wait_for(lambda: self.node_states() == ["idle"] * len(NODES), 60, "four idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--full", f"--user={getpass.getuser()}", check=False)
        deadline = time.monotonic() + 20
        while self.run("squeue", "-h", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for reserved in self._ports:
            reserved.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _configure(self) -> None:
        self._ports = [reserve_port("") for _ in range(1 + len(NODES))]  # nobody else gets them before the daemons do
        port, *node_ports = map(port_of, self._ports)
        first_job = random.randrange(1000, 50_000)  # a job's ports follow from its id, and another cluster may be here
        for device in range(4):  # Slurm wants character devices whose names end with a number
            (self.root / f"gpu{device}").symlink_to("/dev/null")
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-3]\n")
        lines = [CONFIG.format(user=getpass.getuser(), port=port, root=self.root, first_job=first_job)]
        for number, (node, node_port) in enumerate(zip(NODES, node_ports, strict=True)):
            lines.append(
                f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.{number + 2} Port={node_port} CPUs={CPUS} "
                f"RealMemory=20000 Gres=gpu:4 State=UNKNOWN\n"
            )
        (self.root / "slurm.conf").write_text("".join(lines))

    def _start(self, program: str, *arguments: str) -> None:
        parent = os.getpid()
        with (self.root / f"{program}.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [shutil.which(program, path=PATH), *arguments], env=self.env, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=lambda: die_with_parent(parent),
                )
            )  # fmt: skip

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s\n{self._logs()}"
            time.sleep(0.2)

    def _logs(self) -> str:
        tails = [f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.root.glob("*.log")]
        return "\n".join([self.run("squeue", "-a", check=False), *tails])

    def run(self, *command: str, check: bool = True) -> str:
        """Output of one of Slurm's commands."""
        return subprocess.run(
            command, env=self.env, text=True, check=check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ).stdout

    def node_states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job's first component."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner").splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wake(self, job: str) -> None:
        """Have the backfill scheduler, which alone starts heterogeneous jobs, look at a pending one: in a cluster where
        nothing else happens it does not do so by itself."""
        self.run("scontrol", "update", f"JobId={job}", "Comment=wake", check=False)
