"""Run the study: `python tools/study/run.py [--out runs/study] [--jobs 2] [--only TASK/METHOD ...]`.

Every (task, method, seed) of tools/study/study.yaml is one training run on the project's own trainer, with rollouts
sampled in process (tools/study/source.py). A finished run is skipped and an unfinished one goes on from its newest
checkpoint, so the command may be killed and repeated. tools/study/report.py makes docs/study.md's table and plots.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
STUDY = Path(__file__).with_name("study.yaml")


COLD_START = "cold_start"


@dataclass(frozen=True)
class StudyRun:
    """One training run of the study; ``name`` is also its directory below the study's."""

    name: str  # cold_start/POLICY or TASK/METHOD-SEED
    config: str
    overrides: tuple[str, ...]
    policy: str  # the cold start that it begins from, or is
    seed: int = 0
    lag: int = 0


def load_study(path: Path) -> list[StudyRun]:
    """All runs that the study file names: cold starts, then the first seed of everything, then the next."""
    study: dict[str, Any] = yaml.safe_load(path.read_text())
    runs = [
        StudyRun(f"{COLD_START}/{policy}", spec["config"], tuple(spec["set"]), policy)
        for policy, spec in study["cold_starts"].items()
    ]
    for task, spec in study["tasks"].items():
        config = study["cold_starts"][spec["policy"]]["config"]
        for method, seeds in spec["methods"].items():
            overrides = (*spec["set"], *study["methods"][method])
            runs += [
                StudyRun(f"{task}/{method}-{seed}", config, overrides, spec["policy"], seed, spec["lag"])
                for seed in seeds
            ]
    return sorted(runs, key=lambda run: run.seed)


def run_one(run: StudyRun, out: Path) -> None:
    """Train in this process, from the newest checkpoint if there is one."""
    from megatron_sao.config import dump_config, load_config
    from megatron_sao.launch.local import check_run_dir
    from megatron_sao.trainer.runtime import start_runtime, stop_runtime
    from tools.study.source import InProcessRun

    start = [] if run.name.startswith(COLD_START) else [f"model.path={out / COLD_START / run.policy / 'hf'}"]
    name = run.name.replace("/", ".")
    config = load_config(ROOT / run.config, [*run.overrides, *start, f"name={name}", f"seed={run.seed}"])
    check_run_dir(config, out / run.name)  # a run goes on with the settings it began with, or not at all
    (out / run.name).mkdir(parents=True, exist_ok=True)
    (out / run.name / "config.yaml").write_text(dump_config(config))
    logging.basicConfig(level=logging.WARNING)
    backend = start_runtime(config.model, config.parallel, config.seed, deterministic=True)
    try:
        InProcessRun(config, out / run.name, run.lag, backend).run()
    finally:
        stop_runtime()


def supervise(run: StudyRun, study: Path, out: Path) -> bool:
    """Train in a process of its own. Returns whether it finished."""
    directory, log_path = out / run.name, out / f"{run.name}.log"
    if (directory / "seconds").exists():
        return True
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log_path.open("a") as log:
        command = [sys.executable, __file__, "--study", str(study), "--out", str(out), "--in-process", run.name]
        code = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - started
    outcome = "done" if code == 0 else f"FAILED, see {log_path}"
    print(f"{run.name}: {outcome} after {seconds:.0f} s", flush=True)
    if code == 0:
        (directory / "seconds").write_text(f"{seconds:.0f}\n")
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", help="run names or prefixes of them, e.g. calculator/sao")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    runs = load_study(options.study)
    if options.in_process:
        run_one(next(run for run in runs if run.name == options.in_process), out)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [run for run in runs if not options.only or run.name.startswith(tuple(options.only))]
    needed = {run.policy for run in chosen}
    starts = [run for run in runs if run.name.startswith(COLD_START) and run.policy in needed]
    with ThreadPoolExecutor(options.jobs) as pool:
        for group in (starts, [run for run in chosen if run not in starts]):
            if not all(list(pool.map(lambda run: supervise(run, options.study, out), group))):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
