"""A part of a run as a job step: the ``srun`` on the batch node stands for the tasks that it started elsewhere."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time

from megatron_sao.config import ConfigError
from megatron_sao.launch.allocation import slurm
from megatron_sao.launch.process import SupervisedProcess

KILL_SECONDS = 5.0  # that srun may take to kill its tasks


class SupervisedStep(SupervisedProcess):
    """An ``srun`` as :class:`SupervisedProcess` supervises it. Its end is that of the task that failed first: srun's
    own exit code is the largest of all, and it ends the other tasks itself (``--kill-on-bad-exit``)."""

    _failure = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: (?:Exited with exit code (\d+)|(.+))$", re.MULTILINE)
    _noise = re.compile(r"^(?:\s*\d+: )?(?:srun|slurmstepd(?:-\S+)?): ")

    def terminate(self) -> None:
        """Ask the tasks to stop: srun passes SIGUSR1 on, where SIGTERM would have it kill them."""
        self.stop_at_checkpoint()

    def kill(self) -> None:
        """Have srun kill its tasks, then kill srun."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.wait(time.monotonic() + KILL_SECONDS)
        super().kill()

    def restart(self) -> None:
        """Start again. Tasks whose srun was killed are still there, and hold what the new ones need."""
        with contextlib.suppress(ConfigError):  # it ended meanwhile, or the controller does not answer
            for line in slurm("squeue", "-h", "-s", "--me", "-o", "%i %j").splitlines():
                step, name = line.split(maxsplit=1)
                if name == self.name and step.partition(".")[0] in self._jobs():
                    slurm("scancel", "--signal=KILL", step)
        super().restart()

    def _jobs(self) -> set[str]:
        """Ids of the job and of its components."""
        return {value for name, value in self.env.items() if re.fullmatch(r"SLURM_JOB_ID(_HET_GROUP_\d+)?", name)}

    def exit_code(self) -> int | None:
        code, failure = super().exit_code(), self._first_failure()
        return int(failure[3]) if code and failure and failure[3] else code

    def describe_exit(self) -> str:
        failure = self._first_failure()
        if failure is None:
            return super().describe_exit()
        how = f"exit code {failure[3]}" if failure[3] else failure[4].lower()
        return f"task {failure[2]} on {failure[1]}: {how}"

    def last_words(self, lines: int = 20) -> str:
        """Those of the task that failed first; srun's where no task got so far."""
        failure = self._first_failure()
        if failure is None:
            return super().last_words(lines)
        output = self._output(1_000_000).splitlines()
        if "--label" in self.argv:
            mark = re.compile(rf"^\s*{failure[2]}: ")
            output = [mark.sub("", line) for line in output if mark.match(line)]
        own = [line for line in output if line.strip() and not self._noise.match(line)]
        return "\n".join(own[-lines:])

    def _first_failure(self) -> re.Match[str] | None:
        """What srun says of it, once it has ended."""
        return self._failure.search(self._output(1_000_000)) if super().exit_code() else None


def run_steps(commands: list[list[str]], env: dict[str, str], seconds: float) -> None:
    """Run short steps side by side; what they say and whether they succeed does not matter."""
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands
    ]
    deadline = time.monotonic() + seconds
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
