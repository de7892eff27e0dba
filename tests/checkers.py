"""What a checker process is given to run; imported there, so it imports nothing heavy."""

import os


def patient(label: str, answer: str) -> bool:
    """The product's comparison with ten times its time, for a machine that stalls."""
    from megatron_sao.rollout.environments import math  # slow to import

    math.CHECK_SECONDS = 50
    return math.equal(label, answer)


def dies_over_poison(label: str, answer: str) -> bool:
    if "poison" in answer:
        os.abort()
    return label in answer
