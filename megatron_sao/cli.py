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
    "plan": "what each rank of a run would hold, and whether it fits, without a GPU",
    "eval": "held-out success of a model",
    "doctor": "whether this machine can run the system",
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
        return _call(arguments, load_config(arguments.config, arguments.set))
    except ConfigError as error:
        print(f"megatron-sao: {error}", file=sys.stderr)
        return 2


def _call(arguments: argparse.Namespace, config: object) -> int:
    if arguments.command == "doctor":
        from megatron_sao import doctor

        return doctor.main(config, serve=arguments.serve)
    if arguments.command == "plan":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: it builds models without memory, on no device
        from megatron_sao.plan import main as plan

        return plan.main(config, arguments.gpus, arguments.json)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-sao", description="Asynchronous RL for LLM agents with SAO.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {name: subparsers.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}
    for name, command in commands.items():
        command.add_argument("config", nargs="?" if name == "doctor" else None, help="YAML file of the run")
        command.add_argument(
            "--set", action="append", default=[], metavar="A.B=C", help="override a field of the config; repeatable"
        )
        if name not in ("doctor", "plan"):
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
    commands["plan"].add_argument("--gpus", type=int, metavar="N", help="trainer ranks (default: parallel.world_size)")
    commands["plan"].add_argument("--json", action="store_true", help="JSON on stdout, sizes in bytes")
    commands["doctor"].add_argument("--serve", action="store_true", help="start a real SGLang server on a tiny model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
