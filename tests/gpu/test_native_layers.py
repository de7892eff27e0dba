"""Native layers on one CUDA device. Needs torch with CUDA and megatron-core, nothing else of the pinned set's GPU part.

Never run by CI, which has no GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


@pytest.fixture(scope="module")
def world():
    from megatron_sao.config import ModelConfig, ParallelConfig
    from megatron_sao.trainer.runtime import start_runtime, stop_runtime

    yield start_runtime(ModelConfig(path="unused"), ParallelConfig(), seed=0, deterministic=False)
    stop_runtime()


@pytest.mark.parametrize("write", ["write_glm4_moe", "write_llama", "write_deepseek_v3", "write_glm_moe_dsa"])
def test_logits_on_cuda_equal_those_of_transformers_on_the_cpu(write: str, world, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import tests.tiny_models
    from megatron_sao.config import ModelConfig, ParallelConfig
    from megatron_sao.models.build import build_policy
    from megatron_sao.models.hf import read_hf_model, transformer_config
    from megatron_sao.trainer.microbatch import build_microbatches
    from megatron_sao.trainer.trainable import forward_kwargs
    from megatron_sao.weights.load import load_hf_weights
    from tests.trajectories import make_trajectory

    path = getattr(tests.tiny_models, write)(tmp_path / "model")
    model = read_hf_model(path)
    config = transformer_config(model, ModelConfig(path=path), ParallelConfig())
    chunks = build_policy(model, config, "native")
    load_hf_weights(chunks, model, config, "policy")
    trajectory = make_trajectory()
    (batch,) = build_microbatches([trajectory, trajectory], 0, 1, 1000, 1, world.device)
    logits = chunks[0](**forward_kwargs(batch))[0].cpu()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = reference(torch.from_numpy(trajectory.token_ids).long()[None]).logits[0]
    torch.testing.assert_close(logits, torch.cat([expected, expected]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_run_on_recorded_batches_trains_on_cuda(distributed_optimizer: bool, world, tmp_path: Path) -> None:
    from megatron_sao.trainer.main import Run
    from tests.distributed.offline import RL_STEPS, offline_config, read_metrics, write_batches
    from tests.tiny_models import write_glm4_moe

    model = write_glm4_moe(tmp_path / "model")
    config = offline_config(model, parallel={"distributed_optimizer": distributed_optimizer})
    Run(config, tmp_path, write_batches(tmp_path / "batches"), world).run()
    metrics = read_metrics(tmp_path)
    assert ("rl", RL_STEPS - 1) in metrics
    assert 0 < metrics["rl", 0]["train/policy_grad_norm"] < 100


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_log_probabilities_and_their_gradients_on_cuda_equal_float64s(dtype, tolerance, world) -> None:
    from megatron_sao.trainer.logprobs import linear_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1500, 64, generator=generator), torch.randn(9000, 64, generator=generator) / 8
    labels = torch.randint(9000, (1500,), generator=generator)
    leaves = [tensor.to(world.device, dtype).requires_grad_() for tensor in (hidden, weight)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    values, entropy = linear_logprobs(*leaves, labels.to(world.device), 1.0, 9000)
    assert values.dtype == entropy.dtype == torch.float32
    values.sum().backward()
    expected = (exact[0] @ exact[1].T).log_softmax(-1)
    chosen = expected.gather(1, labels.to(world.device)[:, None])[:, 0]
    chosen.sum().backward()
    torch.testing.assert_close(values.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-5)
    for leaf, reference in zip(leaves, exact, strict=True):
        difference = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert difference <= tolerance
