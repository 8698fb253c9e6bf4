"""Start each engine with each model folder below DIR: it takes all tensors, or an error of ours tells why not.

    python -m tests.bench.bench_folders --folders DIR [--only NAME,..] [--engine hf,vllm,rollout] [--json FILE]

The folders must be whole. `taken` and `differs`: the engine has, or has not, the logprobs of transformers. `refused`:
by us. `wrong`: refused, but `taken` without our checks of tensors. `vllm`: our error for one of vLLM. `traceback`: all
other errors, a dead process, no answer. 82 folders take 10 to 20 minutes on two cores.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from gkd.config.schema_rollout import RolloutConfig
from gkd.errors import GkdError
from gkd.rollout.messages import Sampling
from gkd.rollout.vllm.engine import RolloutEngine
from gkd.types import Prompt
from teacher_server.engines import base, folder_check, hf, load, vllm_process
from teacher_server.errors import ServerError
from tests.bench.command import parser
from tests.bench.teacher_report import machine
from tests.engine_process import EngineProcess
from tests.results import write_results

_TOKENS = np.random.default_rng(0).integers(8, 256, 36).astype(np.int32)


def _serve(path: str, engine: str, checks: bool) -> tuple[str, Any]:
    """Run in an engine's process, which starts as in the product. Return the outcome, and (tokens, logprobs) or why."""
    if not checks:
        hf._check_loaded = vllm_process.check_taken = lambda *_: None
    try:
        folder_check.check_folder(Path(path))
        if engine == "rollout":
            folder_check.check_vllm_support(Path(path), on_cpu=True, dtype="float32")
            sizes = RolloutConfig(kv_cache_mib=64, max_num_seqs=8)
            student = RolloutEngine(path, sizes, dtype="float32", max_model_len=64, device="cpu", eos_ids=[])
            (got,) = student.generate([Prompt(0, _TOKENS[:20])], Sampling(1, 1.0, 1.0, max_tokens=16, seed=0))
            return "taken", (np.concatenate([got.prompt_ids, got.response_ids]), got.rollout_logprobs)
        teacher = load.load_engine(load.EngineSettings(model=path, max_tokens=64, engine=engine, device="cpu"))
        return "taken", (_TOKENS, teacher.score([base.TokenSequence(_TOKENS, 20)], base.ScoreParams("sampled"))[0])
    except (ServerError, GkdError) as error:
        is_own = engine == "hf" or isinstance(error.__cause__, ServerError | GkdError | None)
        return "refused" if is_own else "vllm", str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"


def _plain(path: str, tokens: np.ndarray) -> Any:
    """Return the logprobs of transformers, whose default attention leaves out caps and sinks."""
    is_text = "vision_config" not in Path(path, "config.json").read_text()
    kind: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    ids = torch.from_numpy(tokens).long()[None]
    logits = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")(input_ids=ids).logits
    return logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].detach().numpy()


def _outcome(path: str, engine: str, checks: bool = True) -> str:
    with EngineProcess() as process:
        try:
            found, got = process.call(_serve, path, engine, checks, timeout_s=120.0)
        except (EOFError, TimeoutError) as error:
            return f"traceback: {error}"
    if found == "taken":
        off = np.abs(_plain(path, got[0])[-len(got[1]) :] - got[1]).max()
        return f"{'taken' if off < 1e-3 else 'differs'}: by {off:.1g}"
    if found == "refused" and checks and _outcome(path, engine, checks=False).startswith("taken"):
        found = "wrong"
    text = " ".join(got.replace(path, Path(path).name).split())
    return f"{found}: {text if len(text) < 300 else f'{text[:210]} ... {text[-80:]}'}"


def main() -> None:
    made = parser("tests.bench.bench_folders", __doc__ or "", ())
    made.add_argument("--folders", type=Path, required=True, metavar="DIR")
    made.add_argument("--engine", default="hf,vllm,rollout", metavar="NAME,..", help="default: %(default)s")
    args = made.parse_args()
    engines = args.engine.split(",")
    folders = {file.parent.name: str(file.parent) for file in sorted(args.folders.rglob("config.json"))}
    rows = list[dict[str, str]]()
    for name in args.only.split(",") if args.only else folders:
        rows.append({"folder": name} | {engine: _outcome(folders[name], engine) for engine in engines})
        figures = [{"engine": each, **Counter(row[each].partition(":")[0] for row in rows)} for each in engines]
        print(rows[-1], *figures, sep="\n", flush=True)
        if args.json:
            write_results(args.json, {"machine": machine(), "figures": figures, "folders": rows})


if __name__ == "__main__":
    main()
