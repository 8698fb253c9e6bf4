"""One run of TRL for `bench_trl`, in a process of its own.

    PYTHONPATH=DIR_OF_TRL python -m tests.bench.trl_run '{"trainer": "gkd", "folder": ..., "batch": 64, ...}'

prints a JSON line: the time of the end of each step, the losses that it logs, the mean response length and the share of
truncated responses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.bench.trl_models import GPU_SHARE


class StepClock(TrainerCallback):
    """Record when each step ends, and end the training `seconds` after the begin of the first one."""

    def __init__(self, seconds: float) -> None:
        self.ends_s: list[float] = []
        self._left_s, self._until_s = seconds, float("inf")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._until_s = min(self._until_s, time.time() + self._left_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.time())
        control.should_training_stop |= self.ends_s[-1] >= self._until_s


class Lengths:
    """Count the tokens of the responses, from the masks with which TRL trains."""

    def __init__(self, eos: int) -> None:
        self.eos = eos
        self.n_tokens = self.n_responses = self.n_ended = 0

    def add(self, labels: torch.Tensor) -> None:
        trained = labels != -100
        self.n_tokens += int(trained.sum())
        self.n_responses += len(labels)
        self.n_ended += int((trained & (labels == self.eos)).any(1).sum())


def prompts_of(folder: str) -> list[str]:
    with open(f"{folder}/prompts.jsonl") as file:
        return [row.get("rendered", row["prompt"]) for row in map(json.loads, file)]


def colocated(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with vLLM on the student's device, where prompts keep their order."""
    if case["device"] == "cpu":
        from gkd.rollout.vllm.weights import keep_cpu_weights_live

        keep_cpu_weights_live()  # TRL cannot replace the packed weights of vLLM's layers for the CPU
    if case["is_tiny"]:  # eager, for which TRL has no setting
        from trl.generation import vllm_generation  # type: ignore[import-not-found]

        vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    return {
        "per_device_train_batch_size": case["trl_micro_batch"],
        "gradient_accumulation_steps": case["batch"] // case["trl_micro_batch"],
        "shuffle_dataset": False,
        "use_cpu": case["device"] == "cpu",
        "bf16": case["dtype"] == "bfloat16",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": case["max_prompt"] + case["max_response"],
        "vllm_gpu_memory_utilization": GPU_SHARE,
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset  # type: ignore[import-not-found]

    folder = case["folder"]
    clock = StepClock(case["seconds"])
    dtype = getattr(torch, case["dtype"])
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/student", padding_side="left")
    lengths = Lengths(tokenizer.eos_token_id)
    # With mixed precision TRL's own default: the student's weights and states are float32, as ours are.
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(f"{folder}/{role}", dtype=role_dtype)
        for role, role_dtype in (("student", torch.float32 if case["is_colocated"] else dtype), ("teacher", dtype))
    )
    shared = {
        "output_dir": case["output"],
        "per_device_train_batch_size": case["batch"],
        "max_steps": case["steps"],
        "learning_rate": case["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,  # it and the decay are the defaults of ours
        "weight_decay": 0.01,
        "temperature": 1.0,
        "beta": 0.0,  # forward KL
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if case["is_colocated"]:
        shared |= colocated(case)
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts_of(folder)])
    if case["trainer"] == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]

        class Measured(GKDTrainer):
            @staticmethod
            def generate_on_policy_outputs(*args: Any) -> Any:
                outputs = GKDTrainer.generate_on_policy_outputs(*args)
                lengths.add(outputs[2])
                return outputs

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
            tokens = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
            ids, mask = tokens["input_ids"], tokens["attention_mask"]
            names = {"prompts": ids, "prompt_attention_mask": mask, "input_ids": ids, "attention_mask": mask}
            return names | {"labels": ids.clone()}  # replaced by the generated responses, because lmbda is 1

        trainer: Any = Measured(
            model=student,
            teacher_model=teacher,
            args=GKDConfig(**shared, lmbda=1.0, max_new_tokens=case["max_response"]),
            data_collator=collate,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[clock],
        )
    else:
        from trl import DistillationConfig, DistillationTrainer  # type: ignore[import-not-found]

        class Counted(DistillationTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                outputs = super()._generate_and_score_completions(inputs)
                lengths.add(outputs["completion_ids"].masked_fill(outputs["completion_mask"] == 0, -100))
                return outputs

        trainer = Counted(
            model=student,
            teacher_model=teacher,
            args=DistillationConfig(**shared, max_completion_length=case["max_response"]),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[clock],
        )
    trainer.train()
    if case["student_to"]:
        trainer.save_model(case["student_to"])
    return {
        "ends_s": clock.ends_s,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "mean_response": lengths.n_tokens / lengths.n_responses,
        "truncated": 1 - lengths.n_ended / lengths.n_responses,
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
