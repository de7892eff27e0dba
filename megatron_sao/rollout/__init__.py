"""Rollout: SGLang servers behind sidecars, and the workers that play episodes on them."""
