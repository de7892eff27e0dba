"""Make the demo's model and data: `python tools/make_tiny_model.py [--out DIR] [--seed N]`.

Writes into DIR a Hugging Face directory of a tiny GLM-4.5-architecture MoE with random weights (config, float32
safetensors, a character-level tokenizer) and the calculator's `train.jsonl`, `eval.jsonl` and `sft.jsonl`, whose
prompts are disjoint. Does nothing when DIR already holds exactly this.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_sao.rollout.environments.calculator import ALPHABET, demonstration, expressions, render

ARCHITECTURE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # as many as the widest tensor parallelism of the tests
    "head_dim": 32,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
CONTEXT = 128
# The usual 0.02 everywhere leaves a model this small on a plateau: the first steps must not go into growing weights.
EMBEDDING_STD = 1.0
WEIGHT_GAIN = 0.8  # std = gain / sqrt(fan-in)
RESIDUAL_GAIN = 0.35  # the same for what is added to the residual stream
DATA = {"operations": (2, 3), "largest": 99, "train": 8192, "eval": 512, "sft": 20000, "noise": 0.45, "slips": 0.1}


def write_model(directory: Path, seed: int, alphabet: str = ALPHABET, context: int = CONTEXT) -> None:
    """config.json, generation_config.json and model.safetensors. The end of a sequence is the character ``.``."""
    import torch
    from transformers import GenerationConfig, Glm4MoeConfig, Glm4MoeForCausalLM

    ends = {"pad_token_id": 0, "eos_token_id": alphabet.index(".")}
    sizes = {"vocab_size": len(alphabet), "max_position_embeddings": context}
    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**ARCHITECTURE, **sizes, **ends, dtype="float32"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:  # norms start at one
                continue
            residual = "o_proj" in name or "down_proj" in name
            std = (RESIDUAL_GAIN if residual else WEIGHT_GAIN) / parameter.shape[-1] ** 0.5
            parameter.normal_(std=EMBEDDING_STD if "embed_tokens" in name else std)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(directory)


def write_tokenizer(directory: Path, alphabet: str = ALPHABET, context: int = CONTEXT) -> None:
    """One token per character; text with any other character is an error, not an unknown token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(alphabet)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="_", eos_token=".", clean_up_tokenization_spaces=False,
        model_max_length=context,
    ).save_pretrained(directory)  # fmt: skip


def write_data(directory: Path, seed: int) -> None:
    """The three JSONL files, cut from one shuffled pool of different prompts, so that all are equally hard."""
    rng = random.Random(seed)
    pool: dict[str, tuple[list[int | str], int]] = {}
    for expression, value in expressions(rng, DATA["operations"], DATA["largest"]):
        pool.setdefault(render(expression), (expression, value))
        if len(pool) == DATA["train"] + DATA["eval"] + DATA["sft"]:
            break
    prompts = list(pool.items())
    rng.shuffle(prompts)
    rest = iter(prompts)
    for name in ("eval", "train"):
        tasks = [{"prompt": prompt, "label": value} for prompt, (_, value) in islice(rest, DATA[name])]
        write_lines(directory / f"{name}.jsonl", tasks)
    traces = (
        (prompt, demonstration(rng, expression, DATA["noise"], DATA["slips"])) for prompt, (expression, _) in rest
    )
    write_lines(directory / "sft.jsonl", [{"prompt": prompt, "segments": trace} for prompt, trace in traces if trace])


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_directory(directory: Path, sources: list[Path], seed: int, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill the directory, all or nothing; not again while the sources and the seed are the same."""
    recipe = [*(source.read_text() for source in sources), seed]
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    stamp = directory / "made_by.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        print(f"{directory} is up to date")
        return
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    write(partial)
    (partial / stamp.name).write_text(digest)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    print(f"made {directory}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/models/tiny_glm4_moe"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    options = parser.parse_args(arguments)

    def write(directory: Path) -> None:
        write_model(directory, options.seed)
        write_tokenizer(directory)
        write_data(directory, options.seed)

    environment = Path(sys.modules[demonstration.__module__].__file__)
    make_directory(options.out, [Path(__file__), environment], options.seed, write)


if __name__ == "__main__":
    main()
