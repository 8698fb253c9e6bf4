"""List what keys need and exclude of each other. `gkd.config.check` has the checks that compute something.

A condition is a key, which means that its value is not the default, or KEY=VALUE; with a ! in front, the opposite.
"""

from __future__ import annotations

from functools import cache

from gkd.config.schema_sections import Sections, all_keys

# Keys | conditions of which one must hold, else the keys have no effect.
NEEDS = """\
actor.lora.alpha actor.lora.targets weight_sync.lora | actor.lora.rank
actor.optim.decay_steps | actor.optim.schedule=wsd
actor.sequence_parallel | actor.tp
actor.vpp | actor.pp
cluster.teacher_gpu_share | teacher.backend=zmq teacher.backend=http teacher.backend=none
data.max_teacher_prompt_length | data.teacher_prompt_key teacher.prompt_template teacher.prompt_function
data.teacher_key data.domain_shares | teacher.routes
distill.advantage distill.reward_clip | distill.reward_weight
distill.reward_weight | reward.functions
distill.token_share | distill.token_weight
eval.n | eval.metric
model.freeze_vision | data.images_key
reference.path reference.fsdp_cpu_offload | distill.reference_kl_weight distill.teacher_reward_scale
reference.update_interval | distill.reference_kl_weight distill.teacher_reward_scale
rollout.max_turns rollout.environment_timeout_s rollout.environment_workers | rollout.environment
teacher.special_tokens distill.units | teacher.tokenizer
teacher.store | distill.on_policy_share
teacher.update_ema | teacher.update_interval
trainer.keep_best | data.val_files
trainer.max_staleness | trainer.scheduler=stream
trainer.nnodes rollout.nnodes | cluster.ray_address
"""
# Conditions on keys | what must not hold at the same time | why
EXCLUDES = """\
!actor.optim.decay_steps | actor.optim.schedule=wsd | the schedule ends with a decay
!data.teacher_key | teacher.routes | a column of the data has to name the route of a row
!teacher.path | teacher.backend=local | it needs a model
actor.attention | model.dtype=float32 | FlashAttention computes in 16 bits
actor.compile=on | actor.cp | ranks exchange columns within a layer, which is not compiled
actor.fused_lm_head | teacher.tokenizer | texts are compared in chunks of rows
actor.layers=te | actor.lora.rank | Transformer Engine's matrices include the norm, which is the input of adapters
data.images_key | actor.strategy=megatron | it trains a language model without its vision tower
data.images_key | actor.cp | ranks would share the tokens of an image, which was not compared
data.images_key | rollout.environment | what an environment answers cannot have images
data.images_key | teacher.tokenizer | the tokens of an image belong to one processor
data.messages_key | teacher.tokenizer | a conversation is compared token by token
data.truncation | data.images_key !data.truncation=drop | a cut could leave a part of an image
distill.advantage=group | distill.reward_weight rollout.n=1 | the mean of one response is its own reward
distill.loss | distill.losses | its entries replace it
distill.normalize=domain | !teacher.routes | there is one domain
distill.reference_kl_weight | distill.on_policy_share=0 | it is estimated from tokens that the student generated
distill.response_weight=pass_rate distill.response_weight=correct distill.response_weight=wrong | \
!reward.functions | rewards tell which responses are correct
distill.response_weight=pass_rate | rollout.n=1 | the pass rate of one response is 0 or 1, so its weight is 0
distill.reward_weight distill.response_weight | distill.on_policy_share=0 | only responses of the student are judged
distill.skip_first_tokens | teacher.tokenizer | the tokens of the models are not the same
distill.support | distill.on_policy_share=0 | dataset responses have the teacher's ids
distill.support | teacher.backend=rollout | vLLM returns the teacher's most probable ids, and no others
distill.support distill.tail | teacher.tokenizer | the lists have the teacher's tokens
distill.tail=residual | distill.on_policy_share=0 | it needs tokens that the student generated
distill.teacher_reward_scale | teacher.tokenizer | the teacher has no logprob of the student's token
distill.token_clip | distill.loss=sft | it limits divergences and k1 to k3
distill.token_clip | teacher.tokenizer | the loss of a text belongs to several tokens
distill.token_weight | teacher.tokenizer !distill.token_weight=entropy | the teacher's tokens are not the student's
distill.token_weight=position | distill.on_policy_share=0 | it weighs tokens that the student generated
memory.strategy=resident | trainer.colocate | the actor's states move between calls
memory.strategy=resident | actor.offload_train | the actor's states move between calls
model.freeze_vision | actor.lora.rank | only adapters of the language model are trained
model.n_vocab | teacher.backend=rollout | vLLM's probabilities are those of all rows, also of masked ones
reference.fsdp_cpu_offload | trainer.colocate | engines need the GPUs, and the reference's shards would stay there
reference.fsdp_cpu_offload reference.update_interval | actor.lora.rank !reference.path | the reference \
is the actor with its adapters disabled, not a second model
reference.update_interval=1 | | after every step the reference is the student, so the KL to it is 0
rollout.environment | data.chat_template=never | a chat template writes the observations
rollout.environment | teacher.tokenizer | the turns are compared token by token
rollout.top_p rollout.min_p | distill.support | the engines rank only the tokens that it keeps
teacher.backend=rollout | !teacher.prompt_template !data.teacher_prompt_key !teacher.prompt_function | the teacher is \
the student itself, and with the same prompt there is nothing to learn
teacher.backend=rollout | trainer.colocate | the engines sleep while the batch is scored
teacher.fsdp_cpu_offload | teacher.backend=local trainer.colocate | engines need the GPUs, and the teacher's shards \
would stay there
teacher.mass | distill.support | it would drop the student's ids, to which the teacher gives little
teacher.prompt_function | data.teacher_prompt_key | both give the teacher a prompt
teacher.prompt_function | distill.on_policy_share=0 | it gets responses of the student
teacher.prompt_function | teacher.prompt_template | both give the teacher a prompt
teacher.prompt_function | teacher.tokenizer | its prompts are written in the student's tokens
teacher.prompt_function=solved_sibling | !reward.functions | rewards tell which responses are correct
teacher.prompt_function=solved_sibling | rollout.n=1 | there is no other response
teacher.prompt_template | data.teacher_prompt_key | both give the teacher a prompt
teacher.routes | !teacher.backend=zmq !teacher.backend=http !teacher.backend=none | there is one teacher
teacher.routes teacher.store teacher.update_interval | teacher.tokenizer | this works with the student's tokens only
teacher.signal=sampled teacher.signal=logits | teacher.tokenizer | the tokens of the models are not the same
teacher.signal=units | !teacher.tokenizer | these are sums over strings of two tokenizers
teacher.signal=units | !teacher.backend=zmq !teacher.backend=none | only a teacher server sums over units
teacher.temperature teacher.mass teacher.signal=hidden teacher.signal=logits | teacher.backend=rollout | vLLM returns \
top-k lists of one length at temperature 1
teacher.tokenizer | actor.cp | a text may begin in one rank's columns and end in another's
teacher.topk=1 | distill.support=union | half of the ids are the student's
teacher.update_interval=1 | !teacher.update_ema !teacher.prompt_template !data.teacher_prompt_key \
!teacher.prompt_function | after each step the teacher is the student, and with the same prompt there is nothing \
to learn
trainer.scheduler | trainer.colocate | actor and engines alternate, and this scheduler overlaps them
trainer.scheduler | !teacher.backend=zmq !teacher.backend=http !teacher.backend=none !trainer.replay | ranks or \
engines of the run score, too
weight_sync.transport=shared_memory | trainer.nnodes | all members must be on one host
weight_sync.transport=shared_memory | rollout.nnodes | all members must be on one host
weight_sync.transport=nccl weight_sync.transport=ipc | trainer.device=cpu | it needs GPUs
weight_sync.transport=nccl | trainer.colocate | two ranks of a group are on one GPU, which NCCL does not support
weight_sync.transport=ipc | !trainer.colocate | it needs actor and engine on the same card
weight_sync.transport=ipc | actor.pp | each card must hold tensors of all layers
"""


def check_relations(config: Sections) -> None:
    """Raise ConfigError naming a key that has no effect, or that another one excludes."""
    for keys, needed in _rows(NEEDS):
        alternatives = needed.split()
        for name in keys.split():
            if _holds(config, name) and not any(_holds(config, other) for other in alternatives):
                names = " or ".join(alternatives)
                raise config.error(name, f"it has no effect without {names}.", f"remove it, or set {names}.")
    for conditions, excluded, why in _rows(EXCLUDES):
        causes = excluded.split()
        for condition in conditions.split():
            if _holds(config, condition) and all(_holds(config, other) for other in causes):
                name = condition.lstrip("!").partition("=")[0]
                causes = [other for other in causes if not other.startswith(f"!{name}=")]
                words = " and ".join(f"without {other[1:]}" if other[0] == "!" else f"with {other}" for other in causes)
                fix = " or ".join(other.lstrip("!").partition("=")[0] for other in causes)
                problem = f"{words}: {why}." if causes else f"{why}."
                raise config.error(name, problem, f"use another value{', or change ' * bool(causes)}{fix}.")


@cache
def _rows(table: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(cell.strip() for cell in line.split("|")) for line in table.splitlines())


def _holds(config: Sections, condition: str) -> bool:
    """Return whether a condition of the tables holds."""
    name, sep, wanted = condition.removeprefix("!").partition("=")
    value = config.value(name)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return (text == wanted if sep else value != all_keys()[name].default) != condition.startswith("!")
