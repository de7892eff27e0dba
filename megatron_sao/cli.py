"""``megatron-sao``: reads the command line and the config, then calls the command's ``main``.

Each command imports its part only when it is called, so ``--help`` and a typing error answer at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

COMMANDS = {
    "run": "everything on this machine: buffer, engines, workers and trainer, supervised",
    "train": "the trainer, one call per rank (under torchrun or srun)",
    "buffer": "the trajectory buffer",
    "rollout": "one rollout worker",
    "engine": "one SGLang server and its sidecar",
    "environment": "the environment as a service, for rollout workers elsewhere",
    "plan": "what each rank of a run would hold, and whether it fits, without a GPU",
    "eval": "held-out success of a model",
    "doctor": "whether this machine can run the system",
    "slurm": "submit a run as a Slurm job over several nodes",
}
RUN_COMMANDS = {
    "status": "where a run stands: step, rates, engines, queue, last errors",
    "report": "a run's curves and sample trajectories, as one HTML file",
    "inspect": "trajectories and batches in a run's buffer, in words or exported",
}
EXAMPLES = {
    "run": "megatron-sao run model_configs/tiny_glm4_moe.yaml --run-dir runs/short --set rl.steps=20",
    "train": "megatron-sao train runs/mine/config.yaml --run-dir runs/again --batches recorded",
    "buffer": "megatron-sao buffer my_run.yaml --port 8000",
    "rollout": "megatron-sao rollout my_run.yaml --worker-id worker-7",
    "engine": "megatron-sao engine my_run.yaml --index 1",
    "environment": "megatron-sao environment my_run.yaml --port 8600",
    "plan": "megatron-sao plan model_configs/glm5_2_744b.yaml --set model.path=/models/GLM-5.2 --gpus 512",
    "eval": "megatron-sao eval model_configs/tiny_glm4_moe.yaml --hf-dir runs/tiny_glm4_moe/hf",
    "doctor": "megatron-sao doctor my_run.yaml --serve",
    "slurm": "megatron-sao slurm my_run.yaml --nodes=2,2,1 --dry-run",
    "status": "megatron-sao status runs/tiny_glm4_moe --watch",
    "report": "megatron-sao report runs/tiny_glm4_moe",
    "inspect": "megatron-sao inspect runs/tiny_glm4_moe --batch rl-12",
}
EXIT_CODES = (
    "exit codes: 0 done, 1 failed, 2 an unusable config, file or command line; of the trainer also 3 stopped by an "
    "alarm;\nof run and the trainer 75 stopped at a checkpoint by SIGUSR1, of run 128 + n stopped by signal n"
)
RESTARTABLE = ("buffer", "rollout", "engine")  # nothing is to be saved when they stop


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for an unusable config or command line)."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    arguments.command_line = ["megatron-sao", *argv]
    # Under torchrun a rank's parent is torchrun, which the launcher's death kills without a chance to clean up.
    if arguments.command == "train" and "TORCHELASTIC_RUN_ID" in os.environ:
        from megatron_sao.launch.process import die_with_parent

        die_with_parent()
    if arguments.command in RESTARTABLE:  # srun passes SIGUSR1 on, while a SIGTERM makes it kill its tasks
        signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a user's environment and reward, named by import path
    if arguments.command == "doctor" and arguments.config is None:
        return _call(arguments, None)
    from megatron_sao.config import ConfigError, load_config

    try:
        if arguments.command in RUN_COMMANDS:
            return _look(arguments)
        return _call(arguments, load_config(arguments.config, arguments.set))
    except ConfigError as error:
        print(f"megatron-sao: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"megatron-sao: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `megatron-sao inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 1


def _call(arguments: argparse.Namespace, config: object) -> int:
    if arguments.command == "doctor":
        from megatron_sao import doctor

        return doctor.main(config, serve=arguments.serve)
    if arguments.command == "plan":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: it builds models without memory, on no device
        from megatron_sao.plan import main as plan

        return plan.main(config, arguments.gpus, arguments.json)
    if arguments.command == "environment":
        from megatron_sao.rollout import environment_server

        environment_server.main(config, arguments.host, arguments.port, arguments.max_episodes, arguments.idle_seconds)
        return 0
    run_dir = arguments.run_dir or Path("runs") / config.name
    if arguments.command == "run" and arguments.slurm:
        from megatron_sao.launch import slurm

        result = slurm.main(config, run_dir, arguments.slurm)
    elif arguments.command == "run":
        from megatron_sao.launch import local

        result = local.main(config, run_dir)
    elif arguments.command == "slurm":
        from megatron_sao.launch import submit

        result = submit.main(config, run_dir, arguments)
    elif arguments.command == "train":
        from megatron_sao.trainer import main as trainer

        result = trainer.main(config, run_dir, arguments.batches)
    elif arguments.command == "buffer":
        from megatron_sao.buffer import server

        result = server.main(config, run_dir, arguments.host, arguments.port)
    elif arguments.command == "rollout":
        from megatron_sao.rollout import worker

        result = worker.main(config, run_dir, arguments.worker_id)
    elif arguments.command == "engine":
        from megatron_sao.rollout import engine

        port = config.engine.port + arguments.index if config.engine.port else 0
        result = engine.main(config, run_dir, arguments.index, port if arguments.port is None else arguments.port)
    else:
        from megatron_sao.rollout import evaluate

        result = evaluate.main(config, run_dir, arguments.hf_dir, arguments.engine_url, arguments.prompts)
    return result or 0


def _look(arguments: argparse.Namespace) -> int:
    if arguments.command == "status":
        from megatron_sao.report import status

        return status.main(arguments.run, arguments.watch)
    if arguments.command == "report":
        from megatron_sao.report import page

        return page.main(arguments.run, arguments.out)
    from megatron_sao.report import trajectories

    return trajectories.main(arguments.run, arguments.trajectory, arguments.batch, arguments.export_batches)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-sao",
        description="Asynchronous RL for LLM agents with SAO.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {name: _add_command(subparsers, name, text) for name, text in COMMANDS.items()}
    for name, command in commands.items():
        command.add_argument("config", nargs="?" if name == "doctor" else None, help="YAML file of the run")
        command.add_argument(
            "--set", action="append", default=[], metavar="A.B=C",
            help="override a field of the config (megatron_sao/config.py has all); repeatable",
        )  # fmt: skip
        if name not in ("doctor", "plan", "environment"):
            command.add_argument(
                "--run-dir", type=Path, metavar="DIR", help="where everything is written (default: runs/NAME)"
            )
    commands["run"].add_argument(
        "--slurm", nargs="?", choices=("requeue", "end"), const="requeue",
        help="in the batch script of a Slurm job: on its nodes; after the checkpoint before the time limit, requeue "
        "the job (default) or end it",
    )  # fmt: skip
    _add_slurm_options(commands["slurm"])
    commands["train"].add_argument(
        "--batches", type=Path, metavar="DIR", help="train on recorded batches, without any other process"
    )
    commands["buffer"].add_argument("--host", help="default: buffer.host")
    commands["buffer"].add_argument("--port", type=_at_least(0), help="default: buffer.port")
    commands["rollout"].add_argument(
        "--worker-id", default=f"worker-{os.getpid()}", metavar="NAME",
        help="unique among the workers (default: worker- and its process id)",
    )  # fmt: skip
    commands["engine"].add_argument("--index", type=_at_least(0), default=0, help="number of this engine (default: 0)")
    commands["engine"].add_argument("--port", type=_at_least(0), help="default: engine.port + index")
    _add_environment_options(commands["environment"])
    commands["eval"].add_argument("--hf-dir", type=Path, metavar="DIR", help="model to evaluate (default: model.path)")
    commands["eval"].add_argument(
        "--engine-url", action="append", default=[], metavar="URL",
        help="a running server, whose key is MEGATRON_SAO_TOKEN; repeatable (default: start one)",
    )  # fmt: skip
    commands["eval"].add_argument("--prompts", type=_at_least(1), metavar="N", help="default: eval.prompts")
    commands["plan"].add_argument(
        "--gpus", type=_at_least(1), metavar="N", help="trainer ranks (default: parallel.world_size)"
    )
    commands["plan"].add_argument("--json", action="store_true", help="JSON on stdout, sizes in bytes")
    commands["doctor"].add_argument("--serve", action="store_true", help="start a real SGLang server on a tiny model")
    _add_run_commands(subparsers)
    return parser


def _add_command(subparsers: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example: {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _at_least(smallest: float, kind: type = int) -> Callable[[str], float]:
    """An argparse type."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value >= smallest:
            raise argparse.ArgumentTypeError(f"{text} is too small: give {smallest} or more")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


def _add_run_commands(subparsers: argparse._SubParsersAction) -> None:
    commands = {name: _add_command(subparsers, name, text) for name, text in RUN_COMMANDS.items()}
    for command in commands.values():
        command.add_argument("run", type=Path, help="directory of the run")
    watch = commands["status"].add_argument(
        "--watch", type=_at_least(0.1, float), nargs="?", const=2.0, metavar="SECONDS"
    )
    watch.help = "show it again every so often (default: 2) until interrupted"
    commands["report"].add_argument("--out", type=Path, help="default: report.html in the run's directory")
    what = commands["inspect"].add_mutually_exclusive_group()
    what.add_argument("--trajectory", metavar="ID", help="one trajectory, turn by turn")
    what.add_argument("--batch", metavar="STAGE-STEP", help="the members of a batch, such as rl-12")
    what.add_argument("--export-batches", type=Path, metavar="DIR", help="write all batches, for `train --batches DIR`")


def _add_environment_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: the loopback alone)")
    command.add_argument(
        "--port", type=_at_least(0), default=8600, help="default: 8600; 0: a free one, which the log names"
    )
    command.add_argument(
        "--max-episodes", type=_at_least(1), default=1024, metavar="N", help="open at once (default: 1024)"
    )
    command.add_argument(
        "--idle-seconds", type=float, default=3600.0, metavar="S",
        help="close an episode that nobody has called for so long (default: 3600)",
    )  # fmt: skip


def _add_slurm_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nodes", metavar="T,R[,H]",
        help="trainer, rollout and head nodes; one number: trainer and engines share them (default: what the config "
        "needs, the head on the first trainer node)",
    )  # fmt: skip
    command.add_argument(
        "--gpus-per-node", type=_at_least(0), metavar="N",
        help="default: parallel.nproc_per_node, 0 where model.device is cpu",
    )  # fmt: skip
    command.add_argument("--cpus-per-node", type=_at_least(1), metavar="N", help="default: the nodes' all, exclusively")
    command.add_argument(
        "--chain", type=_at_least(1), metavar="N", help="submit N jobs that follow each other, instead of one requeued"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="only print what would run where, and the sbatch command"
    )
    command.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTIONS",
        help='further options of sbatch for every component: --sbatch="--partition=gpu --time=24:00:00"; repeatable',
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
