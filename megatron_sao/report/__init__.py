"""Looking at a run from outside, while it runs and afterwards: ``status``, ``report`` and ``inspect``."""
