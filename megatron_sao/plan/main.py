"""``megatron-sao plan``: the command."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings

from megatron_sao.config import RunConfig, override_config


def main(config: RunConfig, gpus: int | None, json_output: bool) -> int:
    """Print the plan of a run on ``gpus`` ranks (default: ``parallel.world_size``). Returns 0 if it fits, else 1.

    The process must not see a CUDA device. ``model.path`` needs no more than a ``config.json``.

    Raises:
        ConfigError: the model is not supported, or cannot be divided as the config says.
    """
    if gpus is not None:
        config = override_config(config, [f"parallel.world_size={gpus}"])
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Megatron's, about options that are as they should be
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout is the plan's
        from megatron_sao.plan.planner import fits_cluster, make_plan
        from megatron_sao.plan.remedy import find_remedy
        from megatron_sao.plan.report import as_json, as_text
        from megatron_sao.plan.simulate import prepare_process

        prepare_process()
        plan = make_plan(config)
        too_large = not fits_cluster(config, plan.ranks)
        remedy = find_remedy(config, plan.model, plan.worst.place.pp) if too_large else None
    print(json.dumps(as_json(plan, remedy)) if json_output else as_text(plan, remedy))
    return 0 if plan.fits else 1
