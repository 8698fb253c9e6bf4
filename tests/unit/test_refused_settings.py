"""Settings that are refused before anything starts, each under its key."""

from __future__ import annotations

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.relations import EXCLUDES, NEEDS
from gkd.config.schema_sections import all_keys
from tests.refusals import refuses

MINIMAL = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r"]
# Settings that are valid -> further ones, a case a line, that are not. The error names the last key, or that behind ->.
REFUSED = {
    "": """
actor.vpp=2
actor.sequence_parallel=true
actor.max_tokens_per_micro_batch=100
actor.optim.betas=[0.9]
actor.packing=maybe
cluster.ray_address=ray://h:10001
cluster.gpus=[0]
cluster.gpus=[0,0]
data.train_files=[]
distill.units=text
distill.importance_clip=0.5
distill.losses=[{name: jsd}, {name: jsd}]
distill.reward_weight=1
distill.teacher_reward_scale=1.25
distill.reward_clip=[0.2]
distill.reward_clip=[1.0, 0.2]
distill.reward_clip=[0.2, 0]
distill.beta=0.1
distill.alpha=0.5
distill.importance_clip=5
actor.lora.alpha=32
actor.lora.targets=[q_proj]
actor.optim.decay_steps=10
eval.metric=accuracy
health.limits={truncation: 0.5}
health.limits={truncated: -1}
model.path=
reference.update_interval=2
reward.functions=[{path: length}, {path: length}]
reward.functions=[{path: environment}]
rollout.max_turns=3
rollout.environment=shop
teacher.signal=sampled
teacher.path=t
teacher.url=http://a
trainer.stage_timeout_s=360
trainer.run_dir=
trainer.nnodes=2
trainer.loggers=[tensorboard,swanlab]
trainer.loggers=[wandb,wandb]
trainer.profile_steps=[0]
trainer.profile_steps=[12-10]
trainer.profile_steps=[1-1000]
trainer.profile_steps=[3,x]
trainer.project_name=
trainer.keep_best=eval/kl
weight_sync.lora=adapters
actor.tp=2 -> trainer.n_gpus_per_node
trainer.n_gpus_per_node=3  trainer.nnodes=2  actor.tp=2
actor.optim.schedule=wsd -> actor.optim.decay_steps
rollout.n_gpus_per_node=3  rollout.tp=2
trainer.n_gpus_per_node=4  trainer.global_batch_size=2
weight_sync.transport=nccl  trainer.device=cpu -> weight_sync.transport
weight_sync.transport=shared_memory  rollout.nnodes=2  cluster.ray_address=h:1 -> weight_sync.transport
rollout.temperature=0  rollout.n=2 -> rollout.temperature
rollout.temperature=0.005
rollout.temperature=2.5
actor.strategy=megatron  actor.fsdp_cpu_offload=true
actor.strategy=megatron  actor.compile=on
eval.metric=exact_match  eval.answer_marker=
teacher.name=LONG
teacher.mass=0.9  teacher.signal=hidden -> teacher.mass
distill.tail=renorm  teacher.signal=hidden -> distill.tail
distill.tail=drop  distill.loss=k1 -> distill.tail
distill.losses=[{name: k1}, {name: skew_kl, alpha: 5}] -> distill.losses[1].alpha
distill.losses=[{weight: 0.5}] -> distill.losses[0].name
distill.losses=[{name: k1}, {name: kl}] -> distill.losses[1].name
distill.losses=[{name: k1}, {name: jsd, weight: -1}] -> distill.losses[1].weight
distill.losses=[{name: k1}, {name: jsd, beta: 1.0}] -> distill.losses[1].beta
distill.losses=[{name: k1}, {name: jsd, alpha: 0.5}] -> distill.losses[1].alpha
distill.losses=[{name: k1, beta: 0.5}] -> distill.losses[0].beta
distill.losses=[{name: jsd}]  distill.beta=0
distill.losses=[{name: jsd}]  distill.loss=k1
distill.losses=[{name: skew_kl}]  distill.beta=0.1
distill.loss=k1  teacher.mass=0.9
distill.losses=[{name: k1}, {name: jsd}]  distill.on_policy_share=0
distill.loss=k2  distill.on_policy_share=0.1  trainer.global_batch_size=9 -> distill.on_policy_share
teacher.signal=units
distill.loss=sft  distill.on_policy_share=0.9  trainer.global_batch_size=9 -> distill.on_policy_share
distill.losses=[{name: jsd, weight: 0}] -> distill.losses[0].weight
distill.losses=[{name: forward_kl}, {name: sft}] -> distill.on_policy_share
actor.layers=te  actor.lora.rank=8 -> actor.layers
actor.attention=fa3  model.dtype=float32 -> actor.attention
weight_sync.lora=adapters  actor.lora.rank=513 -> weight_sync.lora
reward.functions=[{path: exact}] -> reward.functions[0].path
eval.metric=environment  data.val_files=[v.jsonl] -> eval.metric
rollout.environment=shop:Shop  data.chat_template=never -> rollout.environment
rollout.environment=shop:Shop  rollout.max_turns=100  trainer.stage_timeout_s=3000 -> rollout.environment_timeout_s
reward.functions=[{path: length, weight: 0}] -> reward.functions[0].weight
reward.functions=[{path: exact_match}]  eval.answer_marker=
reward.functions=[{path: 'a:f'}, {path: 'b:f'}]
reward.functions=[{path: length}]  distill.advantage=batch
reward.functions=[{path: length}]  distill.reward_clip=[0.2, 0.3]
rollout.hang_timeout_s=2000
eval.metric=none  eval.n=2
actor.cp=2  trainer.n_gpus_per_node=3
cluster.teacher_gpu_share=0.1  rollout.gpu_memory_utilization=0.95
data.teacher_key=d  teacher.routes={a: {}, b: {}, c: {}}  trainer.global_batch_size=2  data.domain_shares={a: 1, b: 1}
distill.support=union  rollout.min_p=0.05
teacher.backend=local -> teacher.path
teacher.backend=http -> teacher.url
teacher.backend=http  teacher.url='a:8000'
teacher.backend=http  teacher.url='ftp://a'
teacher.backend=http  teacher.url='http://'
teacher.backend=http  teacher.url='http://a/v1'
teacher.backend=http  teacher.url='http://a/v1/'
teacher.backend=http  teacher.url='http://u:p@a'
teacher.backend=http  teacher.url='http://a:99999'
data.teacher_key=d  teacher.routes={a: {url: 'http://a'}} -> teacher.routes.a.url
data.teacher_key=d  teacher.routes={a: {backend: http, url: 'http://a', temperature: 2}} -> teacher.routes.a.temperature
data.teacher_key=d  teacher.routes={a: {backend: http, url: 'http://a'}}  teacher.server_ip=10.0.0.1
data.teacher_key=d  teacher.routes={a: {backend: local}} -> teacher.routes.a.backend
data.teacher_key=d  teacher.routes={a: {backend: tcp}} -> teacher.routes.a.backend
reference.path=other
reference.fsdp_cpu_offload=false
distill.token_weight=teachability  distill.loss=k1 -> distill.token_weight
distill.token_weight=teachability  distill.loss=k1  teacher.signal=sampled -> distill.token_weight
distill.token_weight=position  distill.on_policy_share=0 -> distill.token_weight
distill.token_share=0.5
teacher.backend=rollout
teacher.prompt_template='{prompt}'  data.teacher_prompt_key=t -> teacher.prompt_template
teacher.prompt_template='rule'
teacher.prompt_template='{}'
teacher.prompt_template='{0}'
teacher.prompt_template='{a!r}'
teacher.prompt_template='{a:>3}'
teacher.prompt_template='{a.b}'
teacher.prompt_template='{a'
teacher.prompt_template='a}'
data.max_teacher_prompt_length=9
teacher.prompt_function=sibling
teacher.prompt_function=a:f  data.teacher_prompt_key=t -> teacher.prompt_function
teacher.prompt_function=a:f  teacher.prompt_template='{prompt}' -> teacher.prompt_function
teacher.prompt_function=a:f  distill.on_policy_share=0 -> teacher.prompt_function
teacher.prompt_function=a:f  teacher.tokenizer=t -> teacher.prompt_function
teacher.prompt_function=solved_sibling  rollout.n=2  data.max_teacher_prompt_length=9999 -> teacher.prompt_function
distill.response_weight=rate
distill.response_weight=wrong
distill.response_weight=a:f  distill.on_policy_share=0 -> distill.response_weight
distill.skip_first_tokens=8  data.max_response_length=8 -> distill.skip_first_tokens
distill.skip_first_tokens=-1
data.teacher_key=domain
distill.normalize=domain
data.domain_shares={math: 1}
weight_sync.transport=ipc
distill.tail=residual  distill.loss=forward_kl -> distill.tail
distill.tail=residual  distill.losses=[{name: reverse_kl}, {name: jsd}] -> distill.tail
distill.tail=residual  distill.loss=k3 -> distill.tail
distill.tail=residual  distill.loss=reverse_kl  teacher.signal=hidden -> distill.tail
distill.tail=residual  distill.loss=reverse_kl  distill.on_policy_share=0  data.response_key=r -> distill.tail
trainer.save_every=30 parsecs
trainer.save_every=-5
trainer.save_every=0s
trainer.save_every=5m
trainer.save_every=1.5
trainer.save_every=true
trainer.save_every=[5]
teacher.special_tokens=[a]
data.domain_shares={1: a}
data.system_prompt=an ${open brace
actor.tp=010
cluster.gpus=all
cluster=auto
trainer.schedules={actor.optim.lr: [[0, 1]]}
trainer.schedules={distill.losses.jsd: [[0, 1]]}
trainer.schedules={data.max_response_length: [[0, .inf]]}
trainer.schedules={data.max_response_length: {from: 2, to: 8}}
trainer.schedules={data.max_response_length: 8}
trainer.schedules={data.max_response_length: [[0, 2048]]} -> trainer.schedules.data.max_response_length
trainer.schedules={data.max_response_length: [[0, 0]]} -> trainer.schedules.data.max_response_length
trainer.schedules={data.max_response_length: [[5, 2], [5, 4]]} -> trainer.schedules.data.max_response_length
trainer.schedules={data.max_response_length: [[-1, 2]]} -> trainer.schedules.data.max_response_length
trainer.schedules={data.max_response_length: [[0.5, 2]]} -> trainer.schedules.data.max_response_length
trainer.schedules={data.max_response_length: []} -> trainer.schedules.data.max_response_length
trainer.schedules={data.max_response_length: [[0, 2, 3]]} -> trainer.schedules.data.max_response_length
trainer.schedules={rollout.temperature: [[0, 1], [9, 5]]} -> trainer.schedules.rollout.temperature
trainer.schedules={distill.reward_weight: [[0, 1]]} -> trainer.schedules.distill.reward_weight
""",
    "teacher.backend=http  teacher.url=http://127.0.0.1:8000": """
teacher.api_key_env=sk-123
teacher.server_port=1
teacher.signal=hidden
teacher.temperature=0.7
teacher.mass=0.9
teacher.dialect=sglang  distill.support=union
""",
    "teacher.backend=rollout  teacher.prompt_template=Be brief. {prompt}": """
trainer.colocate=true  rollout.n_gpus_per_node=1 -> teacher.backend
trainer.scheduler=one_step_off
teacher.signal=hidden
teacher.temperature=0.7
teacher.mass=0.9
model.n_vocab=9
distill.support=union
teacher.path=t
teacher.routes={a: {}}  data.teacher_key=domain -> teacher.routes
""",
    "data.images_key=images  actor.strategy=fsdp2  data.truncation=drop": """
actor.strategy=megatron -> data.images_key
actor.cp=2  trainer.n_gpus_per_node=2 -> data.images_key
rollout.environment=a:B -> data.images_key
teacher.tokenizer=teacher -> data.images_key
teacher.backend=http  teacher.url=http://a:1 -> teacher.backend
distill.response_weight=a:f
data.truncation=left
actor.lora.rank=4  model.freeze_vision=false
data.images_key=  model.freeze_vision=false
""",
    "data.teacher_key=domain  teacher.routes={math: {server_port: 7}, code: {weight: 2, temperature: 0.5}}": """
data.teacher_key=
teacher.routes.math.server_port=0
teacher.routes.math.weight=0
teacher.routes.math.name=LONG
teacher.routes.math.weigth=1
teacher.routes.math.server_port=here
teacher.routes={a/b: {}}
teacher.routes=[math]
teacher.backend=local  teacher.path=t -> teacher.routes
distill.reference_kl_weight=0.1
data.domain_shares={math: 1}
data.domain_shares={math: 1, code: 0}
data.domain_shares={math: 1, code: 1, law: 1}
""",
    "teacher.topk=2  distill.support=union": """
teacher.signal=hidden -> distill.support
teacher.signal=logits -> distill.support
distill.loss=k3 -> distill.support
distill.on_policy_share=0  data.response_key=r -> distill.support
teacher.mass=0.9
teacher.topk=1
""",
    "distill.reference_kl_weight=0.1": """
reference.update_interval=1
actor.strategy=fsdp2  actor.lora.rank=4  reference.update_interval=2
distill.on_policy_share=0 -> distill.reference_kl_weight
actor.strategy=fsdp2  actor.lora.rank=8  reference.fsdp_cpu_offload=false
trainer.colocate=true  reference.fsdp_cpu_offload=false
""",
    "teacher.backend=local  teacher.path=t": """
cluster.teacher_gpu_share=0.1
teacher.server_port=1
trainer.scheduler=one_step_off
teacher.update_interval=1
teacher.update_ema=0.5
""",
    "teacher.tokenizer=x": """
distill.loss=k1
distill.token_weight=teachability
distill.skip_first_tokens=2
actor.fused_lm_head=false
rollout.environment=a:B
teacher.signal=logits
distill.tail=drop
distill.support=union
teacher.signal=units  teacher.backend=local  teacher.path=t -> teacher.signal
teacher.signal=units  teacher.backend=http  teacher.url=[http://h] -> teacher.signal
""",
    "reward.functions=[{path: length}]  distill.reward_weight=1  rollout.n=2": """
trainer.schedules={rollout.temperature: [[0, 1], [9, 0.9]]} -> trainer.schedules.rollout.temperature
distill.importance_clip=5
rollout.n=1 -> distill.advantage
distill.on_policy_share=0 -> distill.reward_weight
rollout.temperature=0.7 -> teacher.temperature
data.teacher_key=d  teacher.routes={a: {}, b: {temperature: 2}} -> teacher.temperature
""",
    "reward.functions=[{path: length}]  rollout.n=2  teacher.prompt_function=solved_sibling  \
data.max_teacher_prompt_length=2048": """
rollout.n=1 -> teacher.prompt_function
reward.functions=[{path: length, weight: -1}] -> teacher.prompt_function
data.max_teacher_prompt_length=2047
""",
    "data.val_files=[v]  eval.metric=exact_match": """
trainer.keep_best=eval/acuracy
trainer.keep_best=eval/pass_at_3  eval.n=4 -> trainer.keep_best
trainer.keep_best=eval/pass_at_1
trainer.keep_best=domain/math/accuracy
trainer.keep_best=eval/kl  distill.loss=k1 -> trainer.keep_best
""",
    "actor.cp=2  trainer.n_gpus_per_node=2": """
actor.strategy=fsdp2  actor.packing=false -> actor.cp
actor.strategy=fsdp2  actor.compile=on
teacher.tokenizer=t
""",
    "trainer.colocate=true": """
rollout.n_gpus_per_node=2
cluster.ray_address=h:1  trainer.nnodes=2 -> rollout.nnodes
trainer.scheduler=one_step_off
weight_sync.transport=nccl
teacher.backend=local  teacher.path=t  teacher.fsdp_cpu_offload=false
trainer.device=cpu  weight_sync.transport=ipc
actor.pp=2  trainer.n_gpus_per_node=2  rollout.n_gpus_per_node=2  weight_sync.transport=ipc
""",
    "actor.strategy=fsdp2": """
actor.tp=2  trainer.n_gpus_per_node=2 -> actor.tp
actor.pp=2  trainer.n_gpus_per_node=2 -> actor.pp
actor.vpp=2
actor.ep=2
actor.recompute=selective
actor.sequence_parallel=true
actor.layers=torch
""",
    "data.val_files=[v]": """
trainer.keep_best=accuracy
trainer.keep_best=eval/response_tokens
trainer.keep_best=eval/steps
trainer.keep_best=eval/accuracy
""",
    "distill.losses=[{name: forward_kl}, {name: jsd}]": """
trainer.schedules={distill.losses.forward_kl: [[3, 0]], distill.losses.jsd: [[3, 0]]} -> trainer.schedules
trainer.schedules={distill.losses.jsd: [[0, -1]]} -> trainer.schedules.distill.losses.jsd
""",
    "trainer.scheduler=stream": """
trainer.schedules={data.max_response_length: [[0, 8]]} -> trainer.schedules.data.max_response_length
""",
    "distill.support=student": """
teacher.topk=64  rollout.top_k=20
rollout.top_p=0.9
""",
    "memory.strategy=resident": """
trainer.colocate=true -> memory.strategy
actor.offload_train=true -> memory.strategy
""",
}
CASES = [(settings, row) for settings, rows in REFUSED.items() for row in rows.strip().splitlines()]


@pytest.mark.parametrize(("settings", "row"), CASES)
def test_settings_that_cannot_be_meant_are_refused(settings: str, row: str) -> None:
    """Fails if a run starts, and a rank hangs, crashes or ignores a setting minutes later; or another key is named."""
    overrides, _, key = row.replace("LONG", "x" * 129).partition(" -> ")
    words = overrides.split("  ")
    with refuses(key or words[-1].partition("=")[0]):
        check_config(load_config(None, [*MINIMAL, *settings.split("  "), *words] if settings else [*MINIMAL, *words]))


@pytest.mark.parametrize("settings", [settings for settings in REFUSED if settings])
def test_the_settings_of_the_cases_are_valid(settings: str) -> None:
    """Fails if the cases above would be refused for another reason."""
    check_config(load_config(None, [*MINIMAL, *settings.split("  ")]))


def test_the_tables_of_relations_name_keys_and_values_that_exist() -> None:
    """Fails if a misspelled key or value makes a relation hold never."""
    rows = [row.split("|") for table in (NEEDS, EXCLUDES) for row in table.splitlines()]
    conditions = [condition.lstrip("!") for row in rows for cell in row[:2] for condition in cell.split()]
    assert len(conditions) > 100
    for condition in conditions:
        name, sep, value = condition.partition("=")
        key = all_keys()[name]
        assert not sep or value in (key.setting.choices or value), condition
