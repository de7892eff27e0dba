"""What a checker process is given to run; imported there, so it imports nothing heavy."""

import os


def dies_over_poison(label: str, answer: str) -> bool:
    if "poison" in answer:
        os.abort()
    return label in answer
