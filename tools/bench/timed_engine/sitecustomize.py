"""On PYTHONPATH this has an SGLang server write when it began to receive, had received and had loaded each bucket.

A JSON line per bucket goes to the file that BENCH_RECEIPTS names, with times of the monotonic clock, which all
processes of a machine share.
"""

import json
import os
import sys
import time
from importlib.util import find_spec

MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"


class PatchedOnImport:
    def find_spec(self, name, _path=None, _target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            measure(module.WeightUpdater)

        spec.loader.exec_module = exec_module
        return spec


def measure(updater: type) -> None:
    receive, load = updater._receive_bucketed_weights_from_distributed, updater.load_weights_from_distributed
    receipt: dict = {}

    def timed_receive(self, *, names, **arguments):
        receipt.update(first=names[0], entered=time.monotonic())
        tensors = receive(self, names=names, **arguments)
        receipt["received"] = time.monotonic()
        return tensors

    def timed_load(self, tensors):
        result = load(self, tensors)
        if tensors:
            with open(os.environ["BENCH_RECEIPTS"], "a") as file:
                print(json.dumps(receipt | {"loaded": time.monotonic()}), file=file)
        return result

    updater._receive_bucketed_weights_from_distributed = timed_receive
    updater.load_weights_from_distributed = timed_load


if "BENCH_RECEIPTS" in os.environ:
    sys.meta_path.insert(0, PatchedOnImport())
