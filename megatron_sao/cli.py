"""``megatron-sao``: reads the command line and the config, then calls the command's ``main``.

Each command imports its part only when it is called, so ``--help`` and a typing error answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

COMMANDS = {
    "run": "everything on this machine: buffer, engines, workers and trainer, supervised",
    "train": "the trainer, one call per rank (under torchrun or srun)",
    "buffer": "the trajectory buffer",
    "rollout": "one rollout worker",
    "engine": "one SGLang server and its sidecar",
    "eval": "held-out success of a model",
    "doctor": "whether this machine can run the system",
}
RUN_COMMANDS = {
    "status": "where a run stands: step, rates, engines, queue, last errors",
    "report": "a run's curves and sample trajectories, as one HTML file",
    "inspect": "trajectories and batches in a run's buffer, in words or exported",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for an unusable config or command line)."""
    arguments = _parser().parse_args(argv)
    # Under torchrun a rank's parent is torchrun, which the launcher's death kills without a chance to clean up.
    if arguments.command == "train" and "TORCHELASTIC_RUN_ID" in os.environ:
        from megatron_sao.launch.process import die_with_parent

        die_with_parent()
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
    except BrokenPipeError:  # `megatron-sao inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 1


def _call(arguments: argparse.Namespace, config: object) -> int:
    if arguments.command == "doctor":
        from megatron_sao import doctor

        return doctor.main(config, serve=arguments.serve)
    run_dir = arguments.run_dir or Path("runs") / config.name
    if arguments.command == "run":
        from megatron_sao.launch import local

        result = local.main(config, run_dir)
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
    parser = argparse.ArgumentParser(prog="megatron-sao", description="Asynchronous RL for LLM agents with SAO.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {name: subparsers.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}
    for name, command in commands.items():
        command.add_argument("config", nargs="?" if name == "doctor" else None, help="YAML file of the run")
        command.add_argument(
            "--set", action="append", default=[], metavar="A.B=C", help="override a field of the config; repeatable"
        )
        if name != "doctor":
            command.add_argument("--run-dir", type=Path, help="where everything is written (default: runs/NAME)")
    commands["train"].add_argument("--batches", type=Path, help="train on recorded batches, without any other process")
    commands["buffer"].add_argument("--host", help="default: buffer.host")
    commands["buffer"].add_argument("--port", type=int, help="default: buffer.port")
    commands["rollout"].add_argument("--worker-id", default=f"worker-{os.getpid()}", help="unique name of this worker")
    commands["engine"].add_argument("--index", type=int, default=0, help="number of this engine")
    commands["engine"].add_argument("--port", type=int, help="default: engine.port + index")
    commands["eval"].add_argument("--hf-dir", type=Path, help="model to evaluate (default: model.path)")
    commands["eval"].add_argument("--engine-url", action="append", default=[], help="a running server; repeatable")
    commands["eval"].add_argument("--prompts", type=int, help="default: eval.prompts")
    commands["doctor"].add_argument("--serve", action="store_true", help="start a real SGLang server on a tiny model")
    _add_run_commands(subparsers)
    return parser


def _add_run_commands(subparsers: argparse._SubParsersAction) -> None:
    commands = {name: subparsers.add_parser(name, help=text, description=text) for name, text in RUN_COMMANDS.items()}
    for command in commands.values():
        command.add_argument("run", type=Path, help="directory of the run")
    watch = commands["status"].add_argument("--watch", type=float, nargs="?", const=2.0, metavar="SECONDS")
    watch.help = "show it again every so often (default: 2) until interrupted"
    commands["report"].add_argument("--out", type=Path, help="default: report.html in the run's directory")
    what = commands["inspect"].add_mutually_exclusive_group()
    what.add_argument("--trajectory", metavar="ID", help="one trajectory, turn by turn")
    what.add_argument("--batch", metavar="STAGE-STEP", help="the members of a batch, such as rl-12")
    what.add_argument("--export-batches", type=Path, metavar="DIR", help="write all batches, for `train --batches DIR`")


if __name__ == "__main__":
    sys.exit(main())
