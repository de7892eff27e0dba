"""SAO (Single-Rollout Asynchronous Optimization) on Megatron-Core and SGLang."""

__version__ = "0.1.0"
