"""Megatron's distributed checkpoints (``torch_dist``), written and read one parameter at a time.

What a parameter is called there, and which part of which stored tensor a rank's share of it is, Megatron's own
``sharded_state_dict`` says; the model may be on the ``meta`` device. A checkpoint so written is like one of the
trainer's: full tensors under names without a layout, in files of chunks.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, LoadPlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import HFModel
from megatron_sao.weights.hf_files import WeightError
from megatron_sao.weights.load import weights_of

Template = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True)
class Stored:
    """A chunk of a tensor, or an object (``sizes`` is None), and where in its file it lies."""

    key: str
    start: int
    length: int
    offsets: list[int] | None = None
    sizes: list[int] | None = None
    full: list[int] | None = None
    dtype: str | None = None


def build_on_meta(model: HFModel, config: TransformerConfig) -> list[GPTModel]:
    """This rank's chunks of a policy under the current layout, without memory."""
    with _meta_for_cuda(), torch.device("meta"):
        return build_policy(model, config, "native")


@contextlib.contextmanager
def _meta_for_cuda() -> Iterator[None]:
    """Megatron's modules name their device, which they ask CUDA for."""
    original, meta = torch.cuda.current_device, torch.device("meta")
    torch.cuda.current_device = lambda: meta
    try:
        yield
    finally:
        torch.cuda.current_device = original


@dataclass(frozen=True)
class Place:
    """One of this rank's weights: its global name, its place in a policy's checkpoint, and the tensor."""

    name: str
    template: Template
    tensor: torch.Tensor

    @property
    def is_mine_to_write(self) -> bool:
        """Whether of all ranks that hold these same weights it is this one that writes them."""
        return is_main_replica(self.template.replica_id)


def places(chunks: list[GPTModel], config: TransformerConfig) -> tuple[list[Place], list[tuple[str, bytes]]]:
    """All of this rank's weights; and what else of this rank the trainer's checkpoints hold, as name and content: the
    (empty) extra state of linear layers."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    states = [chunk.sharded_state_dict(prefix="policy.", metadata=metadata) for chunk in chunks]
    extra = [
        (value.unique_key, _serialised(value.data))
        for state in states
        for value in state.values()
        if isinstance(value, ShardedObject) and is_main_replica(value.replica_id)
    ]
    weights = [
        Place(weight.name, states[weight.chunk][f"policy.{weight.local_name}"], weight.tensor)
        for weight in weights_of(chunks, config)
    ]
    return weights, extra


def common_object() -> tuple[str, bytes]:
    """What the checkpoint holds that is the same on all ranks: nothing, but its reader looks for it."""
    return ShardedObject("common_state", None, (1,), (0,)).unique_key, _serialised({})


def _serialised(data: object) -> bytes:
    buffer = io.BytesIO()
    torch.save([data], buffer)
    return buffer.getvalue()


def write_parameter(file: BinaryIO, template: Template, value: torch.Tensor) -> list[Stored]:
    """Append this rank's share ``value`` of a parameter, of whatever dtype it is."""
    return [_write_chunk(file, piece) for piece in _pieces(template, value)]


def write_object(file: BinaryIO, key: str, data: bytes) -> Stored:
    start = file.tell()
    file.write(data)
    return Stored(key, start, len(data))


def _pieces(template: Template, value: torch.Tensor) -> list[ShardedTensor]:
    return list(nested_values(_expanded(template, value)))


def _expanded(template: Template, value: torch.Tensor) -> dict[str, object]:
    dtype = {"dtype": value.dtype} if isinstance(template, ShardedTensor) else {}
    state = {"": replace(template, data=value, **dtype)}
    apply_factories(state)
    return state


def _write_chunk(file: BinaryIO, piece: ShardedTensor) -> Stored:
    data = piece.data.reshape((1,) * piece.prepend_axis_num + tuple(piece.local_shape)).contiguous()
    if data.untyped_storage().nbytes() != data.nbytes:
        data = data.clone()  # torch.save writes the whole storage of a view
    start = file.tell()
    torch.save(data, file)
    return Stored(
        piece.key,
        start,
        file.tell() - start,
        list(piece.global_offset),
        list(data.shape),
        list(piece.global_shape),
        str(data.dtype).removeprefix("torch."),
    )


def write_metadata(directory: Path, stored: dict[str, list[Stored]]) -> None:
    """Make ``directory`` a checkpoint of what its files hold, by file name.

    Raises:
        WeightError: chunks do not make up whole tensors, each element once.
    """
    chunks: dict[str, list[Stored]] = defaultdict(list)
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = []
    for file, records in stored.items():
        for record in records:
            index = MetadataIndex(record.key, record.offsets)
            places.append(WriteResult(index, record.length, _StorageInfo(file, record.start, record.length)))
            if record.sizes is None:
                state[record.key] = BytesStorageMetadata()
            else:
                chunks[record.key].append(record)
    _check_coverage(chunks)
    for key, records in chunks.items():
        dtype = getattr(torch, records[0].dtype)
        for record in records:  # stacked layers of different dtypes: one that holds all of them
            dtype = torch.promote_types(dtype, getattr(torch, record.dtype))
        parts = [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in records]
        state[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(records[0].full), parts)
    FileSystemWriter(directory).finish(Metadata(state), [places])
    save_config(CheckpointingConfig("torch_dist"), str(directory))


def _check_coverage(chunks: dict[str, list[Stored]]) -> None:
    wrong = []
    for key, records in chunks.items():
        regions = [_Region(tuple(r.offsets), tuple(r.sizes)) for r in records]
        shapes = {tuple(r.full) for r in records}
        distinct = len({region.offsets for region in regions}) == len(regions)
        if len(shapes) > 1 or not distinct or sum(r.volume for r in regions) != math.prod(records[0].full):
            wrong.append(key)
    if wrong:
        raise WeightError(f"tensors of the checkpoint that are not written whole, each part once: {sorted(wrong)}")


@dataclass(frozen=True)
class _Region:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)


class MegatronTensors:
    """Lazy access to the policy of a checkpoint: a converted directory or one that the trainer wrote.

    Raises:
        WeightError: the directory is no such checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._reader = directory, FileSystemReader(directory)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, pickle.UnpicklingError) as error:
            raise WeightError(f"{directory} is no Megatron checkpoint: cannot read its .metadata ({error})") from error
        self._reader.set_up_storage_reader(metadata, True)
        tensors = metadata.state_dict_metadata.items()
        self._tensors = {
            key: value
            for key, value in tensors
            if key.startswith("policy.") and isinstance(value, TensorStorageMetadata)
        }

    def problems(self, expected: list[Place]) -> str:
        """What is missing, unexpected or mis-shaped, where ``expected`` is the whole model; "" if nothing."""
        pieces = [piece for place in expected for piece in _pieces(place.template, place.tensor)]
        shapes = {piece.key: (tuple(piece.global_shape), piece.allow_shape_mismatch) for piece in pieces}
        found = {
            "missing": shapes.keys() - self._tensors.keys(),
            "unexpected": self._tensors.keys() - shapes.keys(),
            "mis-shaped": {
                f"{key} {tuple(self._tensors[key].size)} instead of {shape}"
                for key, (shape, padded) in shapes.items()
                if key in self._tensors and not _fits(tuple(self._tensors[key].size), shape, padded)
            },
        }
        return ", ".join(f"{what} {sorted(names)}" for what, names in found.items() if names)

    def files(self) -> set[str]:
        """Names of the files that hold the policy."""
        return {info.relative_path for index, info in self._reader.storage_data.items() if index.fqn in self._tensors}

    def dtype(self, place: Place) -> torch.dtype:
        """Of what :meth:`read` returns."""
        return self._tensors[_pieces(place.template, place.tensor)[0].key].properties.dtype

    def read(self, place: Place) -> torch.Tensor:
        """A rank's share of a parameter, on the CPU and in the stored dtype, whatever the place's own tensor is.

        Raises:
            WeightError: the checkpoint does not hold all of it, or is damaged there.
        """
        pieces = _expanded(place.template, torch.empty_like(place.tensor, device="meta"))
        loaded = _mapped(pieces, self._read_piece)
        if isinstance(place.template, ShardedTensorFactory):
            loaded = apply_factory_merges(loaded, {"": place.template})
        return loaded[""]

    def _read_piece(self, piece: ShardedTensor) -> torch.Tensor:
        if piece.key not in self._tensors:
            raise WeightError(f"the checkpoint {self._directory} lacks {piece.key}")
        stored = self._tensors[piece.key]
        shape = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
        target = torch.zeros(shape, dtype=stored.properties.dtype)
        wanted = [  # a padded vocabulary may be longer here than there
            min(size, full - offset) if piece.allow_shape_mismatch else size
            for size, full, offset in zip(shape, stored.size, piece.global_offset, strict=True)
        ]
        if min(wanted, default=1) > 0:
            region = ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(wanted))
            items = create_read_items_for_chunk_list(piece.key, stored, [region])
            if sum(math.prod(item.lengths) for item in items) != math.prod(wanted):
                raise WeightError(f"the checkpoint {self._directory} lacks a part of {piece.key}")
            try:
                self._reader.read_data(LoadPlan(items), _Into(target))
            except (OSError, RuntimeError, pickle.UnpicklingError) as error:
                raise WeightError(f"the checkpoint {self._directory} is damaged at {piece.key}: {error}") from error
        return target.reshape(piece.local_shape)


def _fits(stored: tuple[int, ...], expected: tuple[int, ...], padded: bool) -> bool:
    return stored[1:] == expected[1:] if padded and len(stored) == len(expected) else stored == expected


def _mapped(state: object, read: object) -> object:
    """A sharded state with every piece replaced by what ``read`` makes of it."""
    if isinstance(state, dict):
        return {key: _mapped(value, read) for key, value in state.items()}
    if isinstance(state, list):
        return [_mapped(value, read) for value in state]
    return read(state)


class _Into(DefaultLoadPlanner):
    """Has chunks read into the tensor given."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: it was read into its place."""


@torch.no_grad()
def load_megatron_weights(
    chunks: list[GPTModel], config: TransformerConfig, directory: Path, head: Literal["policy", "critic"]
) -> None:
    """Fill a policy, or a critic all but its value head, from the policy in a checkpoint, under whatever layout each
    was made.

    Raises:
        WeightError: the checkpoint lacks a parameter or has one of another shape.
    """
    source = MegatronTensors(directory)
    for place in places(chunks, config)[0]:
        if head == "policy" or not place.name.startswith("output_layer."):
            place.tensor.copy_(source.read(place))
