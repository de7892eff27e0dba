"""Whether a Megatron checkpoint computes what `transformers` computes from the Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_sao.config import ConfigError, ModelConfig, ParallelConfig
from megatron_sao.distributed import broadcast_json
from megatron_sao.models.build import build_policy
from megatron_sao.models.hf import HFModel, read_hf_model, transformer_config
from megatron_sao.models.mapping import mtp_tensors
from megatron_sao.trainer.microbatch import MicroBatch
from megatron_sao.trainer.trainable import forward_kwargs
from megatron_sao.weights.hf_files import HFTensors
from megatron_sao.weights.megatron_files import load_megatron_weights


@dataclass(frozen=True)
class Parity:
    """How far the logits ``[tokens, vocabulary]`` of the two implementations are apart.

    Attributes:
        relative_difference: the largest difference over the largest logit.
        top1_agreement: share of positions whose largest logit is the same token's.
        texts, equal_texts: of the greedy continuations, how many there are and how many are the same to the last token;
            0 without prompts.
    """

    tokens: int
    max_difference: float
    mean_difference: float
    largest_logit: float
    relative_difference: float
    top1_agreement: float
    texts: int
    equal_texts: int

    def passes(self, tolerance: float) -> bool:
        return self.relative_difference <= tolerance and self.equal_texts == self.texts

    def as_dict(self, tolerance: float) -> dict[str, Any]:
        return asdict(self) | {"tolerance": tolerance, "passed": self.passes(tolerance)}


@dataclass(frozen=True)
class Sequences:
    """``token_ids`` of every sequence, and where in each the greedy continuation begins; past its end without one."""

    token_ids: list[list[int]]
    starts: list[int]


def random_sequences(vocab_size: int, count: int, length: int) -> Sequences:
    """``count`` sequences of random tokens, from ``length`` down to about half of it."""
    generator = torch.Generator().manual_seed(0)
    lengths = [max(1, length - index * length // (2 * count)) for index in range(count)]
    token_ids = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return Sequences(token_ids, lengths)


@torch.no_grad()
def compare(
    hf: Path,
    megatron: Path,
    parallel: ParallelConfig,
    device: torch.device,
    random: tuple[int, int],
    prompts: tuple[list[str], int] | None,
) -> Parity | None:
    """On rank 0, None elsewhere. Collective over the world of ``parallel``.

    Args:
        random: how many sequences of random tokens, and of what length.
        prompts: texts, and how many tokens `transformers` is to add greedily to each; then the two are compared on
            those texts. They continue alike if and only if each added token has the largest logit in both.
    """
    model = read_hf_model(hf)
    expected, sequences = None, None
    if dist.get_rank() == 0:
        reference = _reference(model).to(device).eval()
        sequences = random_sequences(model.vocab_size, *random)
        if prompts is not None:
            sequences = _continuations(reference, hf, *prompts)
        ids = (torch.tensor([s], device=device) for s in sequences.token_ids)
        expected = torch.cat([reference(i).logits[0].float() for i in ids])
        del reference
    sequences = Sequences(**broadcast_json(sequences and asdict(sequences), device))
    actual = _megatron_logits(model, megatron, parallel, device, sequences.token_ids)
    return None if expected is None else _parity(actual, expected, sequences)


def _reference(model: HFModel) -> torch.nn.Module:
    """What `transformers` makes of the directory, in float32. FP8 weights it gets dequantised: it would do that itself
    on a CPU, but only with a package that is not among ours."""
    if model.fp8_block is None:
        return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    config, source = AutoConfig.from_pretrained(model.path), HFTensors(model.path, model.fp8_block)
    del config.quantization_config
    weights = {name: source[name] for name in source.names() - mtp_tensors(model, source.names())}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)


def _continuations(reference: torch.nn.Module, hf: Path, texts: list[str], new_tokens: int) -> Sequences:
    try:
        tokenizer = AutoTokenizer.from_pretrained(hf)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts needs the tokenizer of {hf}, which cannot be read: {error}") from error
    token_ids, starts = [], []
    for text in texts:
        prompt = tokenizer(text, return_tensors="pt")["input_ids"].to(reference.device)
        output = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False
        )
        token_ids.append(output[0].tolist())
        starts.append(prompt.shape[1])
    return Sequences(token_ids, starts)


def _megatron_logits(
    model: HFModel, megatron: Path, parallel: ParallelConfig, device: torch.device, token_ids: list[list[int]]
) -> torch.Tensor:
    """``[tokens, vocabulary]`` float32 of all sequences, on every rank."""
    config = transformer_config(model, ModelConfig(path=model.path), parallel)
    chunks = build_policy(model, config, "native")
    load_megatron_weights(chunks, config, megatron, "policy")
    logits = last_stage_logits(model, chunks, pack_tokens(token_ids, parallel.tp, device))
    if logits is None:
        logits = torch.empty(sum(map(len, token_ids)), model.vocab_size, device=device)
    last = broadcast_json(parallel_state.get_pipeline_model_parallel_last_rank(), device)
    dist.broadcast(logits, last)
    return logits


def last_stage_logits(model: HFModel, chunks: list[GPTModel], batch: MicroBatch) -> torch.Tensor | None:
    """``[tokens, vocabulary]`` of a pack, without padding, on the ranks of the last pipeline stage, else None; every
    data-parallel rank computes them. Collective."""

    def step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        return chunk(**forward_kwargs(next(batches))), lambda out: (out.sum(), torch.ones((), dtype=torch.int), out)

    outputs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([batch]),
        model=chunks[0],
        num_microbatches=1,
        seq_length=batch.num_tokens,
        micro_batch_size=1,
        forward_only=True,
    )
    if not outputs:
        return None
    whole = gather_from_tensor_model_parallel_region(outputs[0])
    return whole[0, : int(batch.real_tokens.sum()), : model.vocab_size].float().contiguous()


def pack_tokens(token_ids: list[list[int]], multiple: int, device: torch.device) -> MicroBatch:
    """All sequences in one pack, padded to a multiple with a sequence of its own."""
    lengths = [len(ids) for ids in token_ids]
    padding = -sum(lengths) % multiple
    lengths += [padding] if padding else []
    tokens = torch.tensor([*(i for ids in token_ids for i in ids), *[0] * padding], device=device)
    count = len(tokens)
    zeros = torch.zeros(count, device=device)
    return MicroBatch(
        trajectories=[],
        positions=torch.arange(count, device=device),
        tokens=tokens[None],
        position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        labels=tokens[None],
        loss_mask=zeros.bool(),
        rollout_logprobs=zeros,
        rewards=zeros,
        real_tokens=torch.arange(count, device=device) < count - padding,
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
    )


def _parity(actual: torch.Tensor, expected: torch.Tensor, sequences: Sequences) -> Parity:
    difference, largest = (actual - expected).abs(), float(expected.abs().max())
    best = actual.argmax(-1).cpu()
    equal, offset = [], 0
    for ids, start in zip(sequences.token_ids, sequences.starts, strict=True):
        predicted = best[offset + start - 1 : offset + len(ids) - 1].tolist()
        equal.append(predicted == ids[start:])
        offset += len(ids)
    continued = [start < len(ids) for ids, start in zip(sequences.token_ids, sequences.starts, strict=True)]
    return Parity(
        tokens=len(expected),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        largest_logit=largest,
        relative_difference=float(difference.max()) / largest,
        top1_agreement=float((actual.argmax(-1) == expected.argmax(-1)).float().mean()),
        texts=sum(continued),
        equal_texts=sum(same for same, text in zip(equal, continued, strict=True) if text),
    )
