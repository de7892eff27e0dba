"""Trajectories, tasks and recorded batches: formats and validation. numpy only."""
