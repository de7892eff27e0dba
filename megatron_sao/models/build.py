"""GPTModels of a policy or a critic under the current parallel layout."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.models.hf import HFModel
from megatron_sao.models.spec import decoder_block_spec


class ValueHead(torch.nn.Module):
    """A scalar head in place of the vocabulary projection: hidden ``[s, b, h]`` → values ``[s, b, 1]`` float32.

    The weight is replicated over tensor-parallel ranks. It starts small so that the first values are close to
    ``bias``, whatever the backbone's hidden states look like.
    """

    def __init__(self, config: TransformerConfig, bias: float, seed: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        generator = torch.Generator().manual_seed(seed)  # the same on every rank, independent of the layout
        weight = torch.randn(1, config.hidden_size, generator=generator) * (0.01 / config.hidden_size**0.5)
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(weight.to(device=device, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.full((1,), bias, device=device, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def padded_vocab_size(vocab_size: int) -> int:
    """The vocabulary rounded up so that tensor-parallel ranks hold equal shares of it."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return -(-vocab_size // tp) * tp


def build_policy(model: HFModel, config: TransformerConfig, layers: str) -> list[GPTModel]:
    """The model chunks of this rank, one per virtual pipeline stage; weights are uninitialised memory."""
    return _build(model, config, layers, tied=model.tied)


def build_critic(model: HFModel, config: TransformerConfig, layers: str, bias: float, seed: int) -> list[GPTModel]:
    """As :func:`build_policy`, with a :class:`ValueHead` on the last stage instead of the vocabulary projection."""
    chunks = _build(model, config, layers, tied=False)
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(config, bias, seed)
    return chunks


@torch.no_grad()
def copy_backbone(policy: list[GPTModel], critic: list[GPTModel]) -> None:
    """Give a critic the policy's weights, all but the head; both under the same layout."""
    for source, target in zip(policy, critic, strict=True):
        weights = source.state_dict()
        for name, tensor in target.state_dict().items():
            if torch.is_tensor(tensor) and not name.startswith("output_layer."):
                tensor.copy_(weights[name])


def _build(model: HFModel, config: TransformerConfig, layers: str, tied: bool) -> list[GPTModel]:
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
        chunks.append(
            GPTModel(
                config,
                decoder_block_spec(config, layers, vp_stage),
                vocab_size=padded_vocab_size(model.vocab_size),
                max_sequence_length=model.raw["max_position_embeddings"],
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                parallel_output=True,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
                rotary_percent=model.rope["partial_rotary_factor"],
                rotary_base=model.rope["rope_theta"],
                rope_scaling=model.rope["rope_type"] == "llama3",
                rope_scaling_factor=model.rope.get("factor") or 1.0,
                vp_stage=vp_stage,
            )
        )
    return chunks
