"""Answer the prompts of a samples file greedily with vLLM, as `vllm serve` loads a folder: none of this project's code.

python answer_in_vllm.py FOLDER SAMPLES MAX_TOKENS prints the responses' token ids, a JSON list of lists.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()
    from vllm import LLM, SamplingParams

    folder, samples, max_tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    prompts = [{"prompt_token_ids": json.loads(line)["prompt_ids"]} for line in samples.read_text().splitlines()]
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=32 << 20)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
