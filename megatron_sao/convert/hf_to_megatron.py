"""A Hugging Face directory into a Megatron checkpoint, in the memory of a few tensors.

The result is a checkpoint of the policy as the trainer writes it, and beside it

* ``hf/``: what has no place in a Megatron model: config, tokenizer and the like, the tensors of multi-token-prediction
  layers as they are, and the scales of weights that were in FP8;
* ``source.json``: the dtype that every tensor had, so that the way back is exact.

Each rank writes its own share under the layout given. Any other layout reads it as well; the same one reads the fewest
bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from tqdm import tqdm

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.convert.ranks import on_rank_0, stop_on
from megatron_sao.convert.staging import Staging
from megatron_sao.models.hf import HFModel, read_hf_model, transformer_config
from megatron_sao.models.mapping import Entry, entries
from megatron_sao.trainer import checkpoint_files as files
from megatron_sao.trainer.checkpoint import config_fingerprint
from megatron_sao.weights.export import mtp_groups
from megatron_sao.weights.fp8 import SCALE_SUFFIX
from megatron_sao.weights.hf_files import (
    Group,
    HFTensors,
    Shard,
    WeightError,
    copy_companions,
    plan_shards,
    write_index,
    write_shard,
    write_text,
)
from megatron_sao.weights.load import hf_problems, local_slice
from megatron_sao.weights.megatron_files import (
    Place,
    Stored,
    build_on_meta,
    common_object,
    places,
    write_metadata,
    write_object,
    write_parameter,
)

HF, SOURCE = "hf", "source.json"


def convert(hf: Path, out: Path, parallel: ParallelConfig, shard_bytes: int) -> None:
    """Write ``out`` from the HF directory ``hf``. Collective over a world that ``parallel`` describes.

    Raises:
        ConfigError: a model that is not supported or does not divide; tensors missing, unexpected or mis-shaped;
            ``out`` exists.
    """
    model = read_hf_model(hf)
    config = layout(model, parallel)
    weights, extra = places(build_on_meta(model, config), config)
    source = HFTensors(hf, model.fp8_block)
    if problems := hf_problems(source, [(place.name, place.tensor) for place in weights], model, config):
        problems = f"{hf} does not hold the tensors of a {model.model_type} with its config.json: {problems}"
    stop_on(problems or _differing_head(source, model))
    job = {"from": source.fingerprint(), "layout": parallel.model_dump(), "size": shard_bytes, "config": model.raw}
    staging = Staging(out, job)
    on_rank_0(staging.prepare)
    table = {entry.name: entry for entry in entries(model, config)}
    mine = [place for place in weights if place.is_mine_to_write]
    groups = _carried(source, model)
    carried = plan_shards(groups, shard_bytes) if groups else []
    total = sum(_nbytes(place) for place in mine)
    with tqdm(total=total, unit="B", unit_scale=True, desc=out.name, disable=dist.get_rank() > 0) as bar:
        for number, part in enumerate(_parts(mine, shard_bytes)):
            name = f"__{dist.get_rank()}_{number}.distcp"
            if staging.note(name) is None:
                staging.finish(name, _write_part(staging.directory / name, part, source, table, model, config, bar))
            else:
                bar.update(sum(_nbytes(place) for place in part))
    (staging.directory / HF).mkdir(exist_ok=True)
    for shard in carried[dist.get_rank() :: dist.get_world_size()]:
        if staging.note(f"{HF}/{shard.file}") is None:
            write_shard(staging.directory / HF, shard)
            staging.finish(f"{HF}/{shard.file}")
    name = f"__{dist.get_rank()}_objects.distcp"
    staging.finish(name, _write_objects(staging.directory / name, extra))
    dist.barrier()
    on_rank_0(lambda: _complete(staging, source, model, set(table), carried))


def layout(model: HFModel, parallel: ParallelConfig) -> TransformerConfig:
    """The Megatron config of a model under a layout. Raises ConfigError where the layout does not divide the model."""
    try:
        return transformer_config(model, ModelConfig(path=model.path), parallel)
    except (ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        sizes = parallel.model_dump(include={"tp", "pp", "ep", "etp"})
        raise ConfigError(f"{model.path} cannot be divided by {sizes}: {error}; choose other sizes") from error


def _differing_head(source: HFTensors, model: HFModel) -> str:
    """Some writers store a tied head beside the embedding. It must be a copy of it, since only one can be kept."""
    if not model.tied or "lm_head.weight" not in source.names():
        return ""
    if torch.equal(source["lm_head.weight"], source["model.embed_tokens.weight"]):
        return ""
    return (
        f"{model.path}/config.json has tie_word_embeddings = true, but lm_head.weight and model.embed_tokens.weight "
        "differ; correct it, or delete lm_head.weight"
    )


def _carried(source: HFTensors, model: HFModel) -> list[Group]:
    """Tensors that are kept as they are: those of multi-token-prediction layers, and the scales of FP8 weights, by
    which an export knows the blocks that have not changed."""
    untrained = mtp_groups(model, model.path, as_on_disk=True)
    have = {spec.name for group in untrained for spec in group.specs}

    def read(scale: str) -> list[torch.Tensor]:
        return [source.scale(scale.removesuffix(SCALE_SUFFIX))]

    scales = (spec for spec in source.scale_specs() if spec.name not in have)
    return untrained + [Group((spec,), partial(read, spec.name)) for spec in scales]


def _nbytes(place: Place) -> int:
    return place.tensor.numel() * place.tensor.element_size()


def _parts(weights: list[Place], max_bytes: int) -> list[list[Place]]:
    """The parameters of each file, in order."""
    parts: list[list[Place]] = []
    size = max_bytes
    for place in weights:
        if size + _nbytes(place) > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(place)
        size += _nbytes(place)
    return parts


def _write_part(
    path: Path,
    part: list[Place],
    source: HFTensors,
    table: dict[str, Entry],
    model: HFModel,
    config: TransformerConfig,
    bar: tqdm,
) -> dict[str, Any]:
    """Write one file; returns which parameters it holds and where."""
    stored: list[Stored] = []
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        for place in part:
            entry = table[place.name]
            value = local_slice(entry, [source[hf] for hf in entry.hf], model, config)
            stored += write_parameter(file, place.template, value)
            bar.update(_nbytes(place))
    temporary.rename(path)
    return {"parameters": [place.name for place in part], "stored": [asdict(record) for record in stored]}


def _write_objects(path: Path, extra: list[tuple[str, bytes]]) -> dict[str, Any]:
    own = [common_object()] if dist.get_rank() == 0 else []
    with path.open("wb") as file:
        return {"parameters": [], "stored": [asdict(write_object(file, *item)) for item in own + extra]}


def _complete(staging: Staging, source: HFTensors, model: HFModel, parameters: set[str], carried: list[Shard]) -> None:
    """On rank 0, when all ranks have written their files: metadata, what is carried along, and the name."""
    finished = staging.finished()
    notes = {file: note for file, (_, note) in finished.items() if file.endswith(".distcp")}
    written = {name for note in notes.values() for name in note["parameters"]}
    if written != parameters:
        raise WeightError(f"parameters that no rank has written: {sorted(parameters - written)}")
    directory = staging.directory
    write_metadata(directory, {file: [Stored(**s) for s in note["stored"]] for file, note in notes.items()})
    write_index(directory / HF, carried)
    copy_companions(model.path, directory / HF)
    dtypes = {name: str(source.disk_specs(name)[0].dtype).removeprefix("torch.") for name in sorted(source.names())}
    write_text(directory / SOURCE, json.dumps(dtypes))
    checksums = {file: checksum for file, (checksum, _) in finished.items()}
    made = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    checksums |= {file: files.checksum(directory / file) for file in made if file not in checksums}
    files.sync(directory)
    meta = {"config": config_fingerprint(model.raw), "models": ["policy"], "optimizers": [], "files": checksums}
    files.write_meta(directory, meta)
    staging.publish()
