"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

from megatron_sao.plan.layout import describe_layout
from megatron_sao.plan.memory import GB, RESERVED_BYTES, RankMemory
from megatron_sao.plan.planner import Plan, RankPlan, fits_cluster, host_memory

_LISTED = 8  # names that an error in coverage shows
_NOTHING = ("0", "0.0", "0.00")


def as_json(plan: Plan, remedy: list[str] | None) -> dict[str, Any]:
    """Sizes in bytes."""
    coverage = plan.coverage
    return {
        "coverage": {
            "missing": coverage.missing,
            "duplicate": coverage.duplicate,
            "unexpected": coverage.unexpected,
            "tensors": coverage.tensors,
            "carried": coverage.carried,
        },
        "fits": plan.fits,
        "worst_rank": plan.worst.place.rank,
        "remedy": remedy,
        "layout": describe_layout(plan.config, plan.model),
        "cluster": plan.config.cluster.model_dump(),
        "nodes": [{"host_memory": size} for size in host_memory(plan.config, plan.ranks)],
        "ranks": [
            asdict(rank.place) | {"layers": rank.layers, "parameters": rank.parameters} | _memory(rank.memory)
            for rank in plan.ranks
        ],
    }


def _memory(memory: RankMemory) -> dict[str, Any]:
    return asdict(memory) | {"phases": memory.phases, "peak": memory.peak, "host_memory": memory.host}


def as_text(plan: Plan, remedy: list[str] | None) -> str:
    """Tables of layout, parameters and memory, ranks of a stage with the same numbers in one column, and the
    verdict."""
    groups: list[list[RankPlan]] = []
    for rank in plan.ranks:
        group = next((group for group in groups if _alike(group[0], rank)), None)
        if group is None:
            groups.append(group := [])
        group.append(rank)
    shown = [group[0] for group in groups]
    heading = [names_of([rank.place.rank for rank in group]) for group in groups]
    kinds = sorted({kind for rank in shown for kind in rank.parameters})
    parameters = {
        "pipeline stage (from 1)": [str(rank.place.pp + 1) for rank in shown],
        "layers": [str(rank.layers) for rank in shown],
        **{kind: [f"{rank.parameters[kind] / 1e6:,.1f}" for rank in shown] for kind in kinds},
        "all": [f"{rank.parameters.total() / 1e6:,.1f}" for rank in shown],
    }
    columns = [_rows(rank.memory) for rank in shown]
    memory = {name: [f"{column[name] / GB:,.2f}" for column in columns] for name in columns[0]}
    return "\n\n".join(
        [
            "\n".join(f"{name}: {size:,}" for name, size in describe_layout(plan.config, plan.model).items()),
            _coverage_text(plan),
            _table("ranks; parameters in millions", heading, parameters),
            _table("ranks; memory in GB", heading, memory),
            _verdict(plan, remedy),
        ]
    )


def _alike(rank: RankPlan, other: RankPlan) -> bool:
    return (rank.place.pp, rank.parameters, rank.memory) == (other.place.pp, other.parameters, other.memory)


def names_of(ranks: list[int]) -> str:
    """``0, 4 … 28`` or ``1–3, 5–7 … 29–31`` for ascending ranks."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    names = [str(start) if start == end else f"{start}–{end}" for start, end in zip(starts, ends, strict=True)]
    regular = len({b - a for a, b in pairwise(starts)}) == len({b - a for a, b in pairwise(ends)}) == 1
    return f"{names[0]}, {names[1]} … {names[-1]}" if len(names) > 3 and regular else ", ".join(names)


def _rows(memory: RankMemory) -> dict[str, int]:
    """Bytes by the name of a row."""
    rows: dict[str, int] = {}
    where = " (on the host)" if memory.offloaded else ""
    turn = " (in turn)" if memory.in_turn else ""
    for name, state in (("policy", memory.policy), ("critic", memory.critic)):
        if state is not None:
            rows[f"{name}: weights{turn}"] = state.weights
            rows[f"{name}: gradients{turn}"] = state.gradients
            rows[f"{name}: optimizer{where}"] = state.optimizer
    acts = memory.activations
    return rows | {
        "weights the engines have": memory.pushed,
        "CUDA, NCCL, allocator": RESERVED_BYTES,
        "activations kept": acts.kept,
        "activations of a layer at work": acts.working,
        "choices of sparse attention": acts.selections,
        "log-probabilities": acts.logprobs,
        "temporaries of Adam": memory.temporaries,
        "push buffers": memory.push,
        **{f"peak, {phase}": size for phase, size in memory.phases.items()},
        "host": memory.host,
    }


def _table(title: str, heading: list[str], rows: dict[str, list[str]]) -> str:
    """Markdown, so that it can be kept in a document. Rows without anything are left out."""
    lines = [f"| {title} | {' | '.join(heading)} |", "|---|" + "---:|" * len(heading)]
    lines += [
        f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items() if any(c not in _NOTHING for c in cells)
    ]
    return "\n".join(lines)


def _coverage_text(plan: Plan) -> str:
    coverage = plan.coverage
    lines = [
        f"coverage: {coverage.tensors:,} tensors of the checkpoint are held once by the ranks together; "
        f"{coverage.carried:,} of multi-token prediction are carried along"
    ]
    for problem in ("missing", "duplicate", "unexpected"):
        names = getattr(coverage, problem)
        if names:
            lines.append(f"coverage: {len(names):,} {problem}: {', '.join(names[:_LISTED])}")
    return "\n".join(lines)


def _verdict(plan: Plan, remedy: list[str] | None) -> str:
    cluster, worst = plan.config.cluster, plan.worst
    host = max(host_memory(plan.config, plan.ranks))
    sizes = (
        f"rank {worst.place.rank} needs {worst.memory.peak / GB:,.1f} GB of its GPU's {cluster.gpu_memory_gb:g} "
        f"({worst.memory.worst_phase}), a node {host / GB:,.0f} GB of its {cluster.host_memory_gb:g} in host memory"
    )
    if plan.fits:
        return f"YES: {sizes}."
    if fits_cluster(plan.config, plan.ranks):
        return f"NO: the ranks do not hold the model. {sizes}."
    would = "none of the settings tried, nor up to 8 times the ranks, would make it fit"
    if remedy:
        would = "it fits with " + " ".join(f"--set {override}" for override in remedy)
    elif worst.memory.critic is not None:
        states = worst.memory.critic
        would += f"; the critic takes {(states.weights + states.gradients) / GB:,.1f} GB without its optimizer"
    return f"NO: {sizes}; {would}."
