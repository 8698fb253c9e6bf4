"""A pipeline of your own: the steps of on-policy distillation, written out. docs/own_pipeline.md explains it.

python examples/own_pipeline.py examples/own_pipeline.yaml [key=value ...]
"""

import json
import sys

import numpy as np

from gkd.api import load_config, open_pools, state_offload_manager


def main() -> None:
    config = load_config(sys.argv[1], sys.argv[2:])
    size, n, temperature = config.trainer.global_batch_size, config.rollout.n, config.rollout.temperature
    with open_pools(config, engines_sleep=True) as pools:
        actor, rollout, scoring, plan = pools.actor, pools.rollout, pools.scoring, pools.plan
        pools.weight_sync.push(0)
        for step in range(1, plan.total_steps + 1):
            metrics: dict[str, float] = {}
            prompts = [plan.train_prompts[i % len(plan.train_prompts)] for i in range((step - 1) * size, step * size)]
            chunks = rollout.generate(prompts, prompt_indices=range(size), n=n, temperature=temperature, seed=step)
            pending = [scoring.submit(chunk) for chunk in chunks]  # the teacher scores while the engines generate
            rollout.offload_states(level=2)  # drop the weights: the next sync brings new ones
            metrics["memory/engines"] = rollout.allocated_bytes() / 2**30
            with state_offload_manager(actor, metrics, "step"):
                logprobs = actor.compute_logprobs(pending, blocking=False)  # these two run while the teacher scores
                reference = pools.reference.compute_logprobs(pending, blocking=False)
                batch = reference.wait(scoring.collect(pending))
                own = np.concatenate([sequence for chunk in logprobs.wait() for sequence in chunk])
                stats = actor.train_step(batch)
                pools.weight_sync.push(step)
            metrics |= {"loss": stats.loss, "logprob": float(own.mean()), **stats.extra}
            print(json.dumps({"step": step, **metrics}), flush=True)
        actor.export_hf(plan.folder.new_export)
        print(f"the student is in {plan.folder.publish_export()}")


if __name__ == "__main__":
    main()
