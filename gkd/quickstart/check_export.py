"""Compare greedy responses of the exported model in transformers with those of the rollout engine."""

from __future__ import annotations

import json
from pathlib import Path


def count_equal(export: Path, samples: Path) -> tuple[int, int]:
    """Return (samples with identical tokens, samples), decoded greedily in float32.

    Args:
        export: Hugging Face folder of the trained student.
        samples: `samples/step_N.jsonl` of the run: greedy responses of the engine after the last weight sync.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, local_files_only=True).eval()
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    equal = 0
    with torch.inference_mode():
        for line in lines:
            prompt = torch.tensor([line["prompt_ids"]])
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=len(line["response_ids"]),
                do_sample=False,
            )
            equal += output[0, prompt.shape[1] :].tolist() == line["response_ids"]
    return equal, len(lines)
