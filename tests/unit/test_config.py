"""Config: loading YAML and overrides, limits, contradictions, documentation."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import config_yaml, load_config
from gkd.config.schema_sections import DeclaredKey, all_keys
from gkd.errors import ConfigError
from gkd.memory.footprint.estimate import scores_gib
from teacher_server.config.declare import Setting
from tests.pages import tables, with_tables
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r"]
SHOP = "rollout.environment=shop:Shop"
REWARDS = ["reward.functions=[{path: length}]", "distill.reward_weight=1", "rollout.n=2"]
KL = ["distill.reference_kl_weight=0.1"]
CP = ["actor.cp=2", "trainer.n_gpus_per_node=2"]
LORA = ["actor.strategy=fsdp2", "actor.lora.rank=4"]
LOCAL = ["teacher.backend=local", "teacher.path=t"]
HTTP = ["teacher.backend=http", "teacher.url=http://127.0.0.1:8000"]
BEST = ["data.val_files=[v]", "eval.metric=exact_match"]
ROUTES = ["data.teacher_key=d"]
EMA = ["teacher.update_interval=3", "teacher.update_ema=0.5"]


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """Fails if a run ignores a value of its YAML or command line."""
    file = tmp_path / "x.yaml"
    file.write_text("actor: {tp: 2, optim: {lr: 0.5}}\nrollout: {n: 3}\n")
    config = load_config(file, ["rollout.n=4", "actor.optim.betas=[0.8, 0.9]"])
    assert (config.actor.tp, config.actor.optim.lr, config.rollout.n, config.actor.pp) == (2, 0.5, 4, 1)
    assert config.actor.optim.betas == [0.8, 0.9]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "Be brief.\n\n- No lists.\n# End",
            "hi # there",
            "Rules: a, b",
            "{prompt} {answer}",
            "[x]",
            " two ",
            "a\r\nb",
        ),
        *("off", "1e5", "1.10", "010", "1:30", "2024-01-01", "#### ", "*x", "- x"),
    ],
)
def test_a_text_of_the_command_line_is_kept_as_it_is(text: str, tmp_path: Path) -> None:
    """Fails if a prompt of the command line is cut at a `#` or loses its lines, or a name becomes a number."""
    config = load_config(None, [*MINIMAL, f"data.system_prompt={text}"])
    assert config.data.system_prompt == text
    (tmp_path / "c.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_later_files_win_over_earlier_ones(tmp_path: Path) -> None:
    """Fails if a file is ignored, or lists of two files are joined; or the integer 8.0 is refused."""
    (tmp_path / "base.yaml").write_text(
        "rollout: {tp: 2, max_num_seqs: 8.0}\ndata: {train_files: [a.jsonl, b.jsonl]}\n"
    )
    (tmp_path / "mine.yaml").write_text("rollout: {tp: 4}\ndata: {train_files: [c.jsonl]}\n")
    config = load_config([tmp_path / "base.yaml", tmp_path / "mine.yaml"], ["actor.tp=2"])
    assert (config.rollout.tp, config.rollout.max_num_seqs, config.actor.tp) == (4, 8, 2)
    assert config.data.train_files == ["c.jsonl"]


def test_a_text_of_the_command_line_may_be_quoted_or_refer_to_a_key() -> None:
    """Fails if the quotes that a YAML needs become part of a text, or ${...} and the value off are not read."""
    words = ["data.system_prompt='a # b'", 'data.answer_key="x"', "data.response_key=${data.answer_key}y"]
    config = load_config(None, [*MINIMAL, *words, "trainer.progress=off"])
    assert (config.data.system_prompt, config.data.answer_key, config.data.response_key) == ("a # b", "x", "xy")
    assert config.trainer.progress == "off"


def test_a_value_that_is_still_to_be_set_is_refused(tmp_path: Path) -> None:
    """Fails if `???` of a Hydra file becomes the default without a word, or is refused where an argument sets it."""
    file = tmp_path / "x.yaml"
    file.write_text("actor:\n  optim:\n    lr: ???\n")
    with refuses("actor.optim.lr"):
        load_config(file, MINIMAL)
    assert load_config(file, [*MINIMAL, "actor.optim.lr=1e-5"]).actor.optim.lr == 1e-5
    with refuses("distill.loss"):
        load_config(None, [*MINIMAL, "distill.loss=???"])
    file.write_text("distill:\n  losses:\n  - name: jsd\n    weight: ???\n")
    with refuses("distill.losses"):
        load_config(file, MINIMAL)
    assert load_config(file, [*MINIMAL, "distill.losses=[{name: k1}]"]).distill.losses[0].name == "k1"


@pytest.mark.parametrize("text", ["no", "off", "1e3", "2024-01-01", "1:30", "010", "x y"])
def test_a_text_of_a_file_is_kept_as_it_is(text: str, tmp_path: Path) -> None:
    """Fails if a column named no or 1e3 becomes False or 1000.0, in the file or in the copy that a run saves."""
    file = tmp_path / "x.yaml"
    file.write_text(f"data: {{answer_key: {text}, response_key: '{text}'}}\ntrainer:\n  progress: off\n")
    config = load_config(file, MINIMAL)
    assert (config.data.answer_key, config.data.response_key, config.trainer.progress) == (text, text, "off")
    file.write_text(config_yaml(config))
    assert load_config(file) == config


def test_a_text_that_a_file_merges_is_kept_as_it_is(tmp_path: Path) -> None:
    """Fails if `<<: *name` makes 1000.0 of a folder 1e3, or wins over a key that is written out."""
    file = tmp_path / "x.yaml"
    file.write_text("teacher: &t {path: 1e3}\nreference: {<<: *t}\nmodel: {path: 2e3, <<: *t}\n")
    config = load_config(file)
    assert (config.teacher.path, config.reference.path, config.model.path) == ("1e3", "1e3", "2e3")


def test_texts_in_lists_and_entries_are_kept_as_they_are(tmp_path: Path) -> None:
    """Fails if a file 010 or on in a list, or a teacher named off in a route, becomes 8, True or False."""
    routes = "{a: &a {name: off, keys: 1e3, server_port: 10}, b: {<<: *a, name: 1_0}}"
    pairs = '{"a.b": on, c: 1e3}'
    file = tmp_path / "x.yaml"
    file.write_text(f"data: {{train_files: [010, on, 1e-3]}}\nteacher: {{routes: {routes}, special_tokens: {pairs}}}\n")
    written = load_config(file)
    lists = ["data.train_files=[010, on, 1e-3]", f"teacher.routes={routes}", f"teacher.special_tokens={pairs}"]
    for config in (written, load_config(None, lists)):
        assert config.data.train_files == ["010", "on", "1e-3"]
        assert config.teacher.special_tokens == {"a.b": "on", "c": "1e3"}
        found = {name: (route.name, route.keys, route.server_port) for name, route in config.teacher.routes.items()}
        assert found == {"a": ("off", "1e3", 10), "b": ("1_0", "1e3", 10)}
    assert load_config(None, ["teacher.routes.a.name=off"]).teacher.routes["a"].name == "off"
    with refuses("teacher.routes.a.server_port"):
        load_config(None, ["teacher.routes={a: {server_port: 010}}"])


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run writes into a folder named ~ below the working folder, and its log names the user's home."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "x.yaml").write_text("trainer: {run_dir: ~/runs/x, resume: $HOME/r}\ndata: {system_prompt: ~/$HOME}\n")
    config = load_config(tmp_path / "x.yaml", ["data.train_files=[~/a.jsonl, ~b]", "teacher.store=~/s"])
    found = (config.trainer.run_dir, config.trainer.resume, config.teacher.store)
    assert found == ("/home/me/runs/x", "/home/me/r", "/home/me/s")
    assert config.data.train_files == ["/home/me/a.jsonl", "~b"] and config.data.system_prompt == "~/$HOME"
    routes = load_config(None, ["teacher.routes={a: {keys: ~/k}, b: {keys: $HOME/k, name: ~}}"]).teacher.routes
    assert routes["a"].keys == routes["b"].keys == "/home/me/k" and routes["b"].name is None
    with refuses("teacher.routes.a.keys"):
        load_config(None, ["teacher.routes.a.keys=$NOT_SET/x"])
    with refuses("trainer.run_dir"):  # a folder of this name
        load_config(tmp_path / "x.yaml", ["trainer.run_dir=$NOT_SET/x"])


def test_a_tab_behind_a_key_is_a_space(tmp_path: Path) -> None:
    """Fails if a file with a tab before a value or a comment ends in a traceback."""
    (tmp_path / "x.yaml").write_text("actor:\n  tp:\t2\t# ranks\n")
    assert load_config(tmp_path / "x.yaml").actor.tp == 2


@pytest.mark.parametrize("text", ["costs ${answer}", r"a \${model.path} ${x", "\\"])
def test_the_copy_of_a_run_keeps_a_dollar_with_a_brace(text: str, tmp_path: Path) -> None:
    """Fails if the config.yaml of a run replaces ${model.path} in its prompt, or cannot be read to resume it."""
    written = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    config = load_config(None, [*MINIMAL, f"data.system_prompt={written}"])
    assert config.data.system_prompt == text
    (tmp_path / "c.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    "override",
    [
        *("teacher.special_tokens=[a]", "teacher.special_tokens={1: a}", "teacher.routes={no: {server_port: 1}}"),
        *("data.domain_shares={1: 0.5, 2: 0.5}", "data.system_prompt=an ${open brace"),
        "actor.tp=010",  # eight ranks in YAML
    ],
)
def test_a_wrong_value_of_any_type_is_refused(override: str) -> None:
    """Fails if a mapping with a wrong name or another type, or an open ${, is a traceback, or a number is octal."""
    with refuses(override.partition("=")[0]):
        load_config(None, [*MINIMAL, override])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer: {save_every: 1:30}", "trainer.save_every"),
        ("actor: {tp: 010}", "actor.tp"),
        ("health: {limits: {truncated: 1:30}}", "health.limits.truncated"),
        ("actor.optim.lr: 1e-3", "actor.optim.lr"),
        ("actor: {optim.lr: 1e-3}", "actor.optim.lr"),
    ],
)
def test_what_yaml_reads_as_another_number_or_key_is_refused(text: str, key: str, tmp_path: Path) -> None:
    """Fails if 1:30 becomes 90 steps and 010 eight ranks, or a key with dots does not say how to nest it."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with refuses(key):
        load_config(file, MINIMAL)


def test_a_saved_config_loads_as_itself(tmp_path: Path) -> None:
    """Fails if the config.yaml of a checkpoint does not describe its run."""
    config = load_config(None, [*MINIMAL, "teacher.topk=7", "data.val_files=[b, c]"])
    (tmp_path / "c.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("actor.tpp=2", "actor.tpp", "actor.tp"),
        ("rollot.n=2", "rollot.n", "rollout.n"),
        ("actor.tp=two", "actor.tp", ""),
        ("model.path=", "model.path", ""),
        ("data.train_files=a.jsonl", "data.train_files", "[a.jsonl]"),
        ("data.shuffle=often", "data.shuffle", ""),
        ("health.limits=[truncated]", "health.limits", "truncated: 0.9"),
        ("distill.beta=x", "distill.beta", "0.5"),
        ("distill.losses=[{name: jsd, wieght: 1}]", "distill.losses[0].wieght", " weight"),
        ("distill.losses=[{name: k1}, {name: jsd, weight: x}]", "distill.losses[1].weight", ""),
        ("distill.losses={name: jsd}", "distill.losses", "[{name: jsd"),
        ("distill.losses=[jsd]", "distill.losses", "[{name: jsd"),
        ("reward.functions=length", "reward.functions", "[length]"),
        ("actor.optm=${foo}", "actor.optm", "actor.optim"),
        ("distill.lmbda=0.5", "distill.lmbda", "distill.on_policy_share"),
        ("actor.optim.learning_rate=5", "actor.optim.learning_rate", "actor.optim.lr"),
        ("actor.lr=5", "actor.lr", "actor.optim.lr"),
        ("trainer.tp=2", "trainer.tp", "rollout.tp"),
        ("rollout.kv_cache_mib=2GiB", "rollout.kv_cache_mib", "integer"),
        ("trainer.logger=wandb", "trainer.logger", "trainer.loggers"),
        ("data.zzz=8", "data.zzz", "--help"),
        ("actor.tp", "override", "key=value"),
        ("data.train_files=[a", "data.train_files", ""),
        ("trainer=5", "trainer", "trainer.KEY"),
    ],
)
def test_a_wrong_override_names_key_value_and_fix(override: str, key: str, hint: str) -> None:
    """Fails if a typo is accepted, ends in an error of the parser, or does not name the right key (`hint`)."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    error = caught.value
    assert error.key == key
    assert hint in error.problem + error.fix
    assert "omegaconf" not in str(error).lower() and "Node" not in str(error) and "'None'" not in str(error)
    if override.startswith(f"{key}=") and not override.endswith(("=", "}", "]", "[a")):
        assert str(error.value) == override.partition("=")[2]


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    """Fails if a user with five mistakes has to start the run five times."""
    file = tmp_path / "x.yaml"
    file.write_text("actor: {tpp: 2, pp: two}\ndata: {train_files: a.jsonl}\nteacher: {topk: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["rollout.n=-1", "actor.tp", "model.path=m", "trainer.run_dir=r"])
    errors = [caught.value, *caught.value.more]
    wrong = {"actor.tpp", "actor.pp", "data.train_files", "teacher.topk", "rollout.n", "override"}
    assert {error.key for error in errors} == wrong and len(errors) == len(wrong)
    assert len(str(caught.value).splitlines()) == len(wrong)
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, [*MINIMAL, "rollout.n=-1", "distill.loss=rkl"]))
    assert {caught.value.key, *(error.key for error in caught.value.more)} == {"rollout.n", "distill.loss"}
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.more[0].key == caught.value.more[0].key


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n"])
def test_an_invalid_file_is_refused(tmp_path: Path, text: str) -> None:
    """Fails if a damaged YAML causes an internal error later."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with refuses("--config"):
        load_config(file)
    with refuses("--config", str(tmp_path / "absent.yaml")):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "override",
    [
        *("actor.vpp=2", "actor.sequence_parallel=true", "actor.max_tokens_per_micro_batch=100"),
        *("actor.optim.betas=[0.9]", "actor.packing=maybe"),
        *("cluster.ray_address=ray://h:10001", "cluster.gpus=[0]", "cluster.gpus=[0,0]"),
        "data.train_files=[]",
        *("distill.units=text", "distill.importance_clip=0.5"),
        *("distill.losses=[{name: jsd}, {name: jsd}]", "distill.reward_weight=1"),
        *("distill.teacher_reward_scale=1.25", "distill.reward_clip=[0.2]"),
        *("distill.reward_clip=[1.0, 0.2]", "distill.reward_clip=[0.2, 0]"),
        *("distill.beta=0.1", "distill.alpha=0.5", "distill.importance_clip=5"),
        *("actor.lora.alpha=32", "actor.lora.targets=[q_proj]", "actor.optim.decay_steps=10"),
        "eval.metric=accuracy",
        *("health.limits={truncation: 0.5}", "health.limits={truncated: -1}"),
        "model.path=",
        "reference.update_interval=2",
        *("reward.functions=[{path: length}, {path: length}]", "reward.functions=[{path: environment}]"),
        *("rollout.max_turns=3", "rollout.environment=shop"),
        *("teacher.signal=sampled", "teacher.path=t", "teacher.url=http://a"),
        *("trainer.stage_timeout_s=360", "trainer.run_dir=", "trainer.nnodes=2"),
        *("trainer.loggers=[tensorboard,swanlab]", "trainer.loggers=[wandb,wandb]"),
        *("trainer.profile_steps=[0]", "trainer.profile_steps=[12-10]", "trainer.profile_steps=[1-1000]"),
        *("trainer.profile_steps=[3,x]", "trainer.project_name=", "trainer.keep_best=eval/kl"),
        "weight_sync.lora=adapters",
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(override: str) -> None:
    """Fails if a key has a value that it cannot have, or none with the other defaults, and a run starts."""
    with refuses(override.partition("=")[0]):
        check_config(load_config(None, [*MINIMAL, override]))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor.tp=2"], "trainer.n_gpus_per_node"),
        (["distill.response_weight=correct"], "distill.response_weight"),
        (["distill.response_weight=pass_rate", "reward.functions=[{path: length}]"], "distill.response_weight"),
        (
            ["distill.response_weight=correct", "reward.functions=[{path: length, weight: -1}]"],
            "distill.response_weight",
        ),
        (["trainer.n_gpus_per_node=3", "trainer.nnodes=2", "actor.tp=2"], "actor.tp"),
        (["actor.optim.schedule=wsd"], "actor.optim.decay_steps"),
        (
            ["actor.optim={schedule: wsd, decay_steps: 5, warmup_steps: 6}", "trainer.total_steps=10"],
            "actor.optim.decay_steps",
        ),
        (["rollout.n_gpus_per_node=3", "rollout.tp=2"], "rollout.tp"),
        (["trainer.n_gpus_per_node=4", "trainer.global_batch_size=2"], "trainer.global_batch_size"),
        (["weight_sync.transport=nccl", "trainer.device=cpu"], "weight_sync.transport"),
        (
            ["weight_sync.transport=shared_memory", "rollout.nnodes=2", "cluster.ray_address=h:1"],
            "weight_sync.transport",
        ),
        (["rollout.temperature=0", "rollout.n=2"], "rollout.temperature"),
        (["rollout.temperature=0.005"], "rollout.temperature"),  # vLLM would sample at 0.01
        (["rollout.temperature=2.5"], "rollout.temperature"),
        (["trainer.colocate=true", "rollout.n_gpus_per_node=2"], "rollout.n_gpus_per_node"),
        (["trainer.colocate=true", "cluster.ray_address=h:1", "trainer.nnodes=2"], "rollout.nnodes"),
        (["trainer.colocate=true", "trainer.scheduler=one_step_off"], "trainer.scheduler"),
        (["trainer.colocate=true", "weight_sync.transport=nccl"], "weight_sync.transport"),
        (
            ["trainer.colocate=true", "teacher.backend=local", "teacher.path=t", "teacher.fsdp_cpu_offload=false"],
            "teacher.fsdp_cpu_offload",
        ),
        (["actor.strategy=megatron", "actor.fsdp_cpu_offload=true"], "actor.fsdp_cpu_offload"),
        (["eval.metric=exact_match", "eval.answer_marker="], "eval.answer_marker"),
        ([f"teacher.name={'x' * 129}"], "teacher.name"),
        (["teacher.mass=0.9", "teacher.signal=hidden"], "teacher.mass"),
        (["distill.tail=renorm", "teacher.signal=hidden"], "distill.tail"),
        (["distill.tail=drop", "distill.loss=k1"], "distill.tail"),
        ([*REWARDS, "distill.importance_clip=5"], "distill.importance_clip"),
        (["distill.losses=[{name: k1}, {name: skew_kl, alpha: 5}]"], "distill.losses[1].alpha"),
        (["distill.losses=[{weight: 0.5}]"], "distill.losses[0].name"),
        (["distill.losses=[{name: jsd}]", "distill.beta=0"], "distill.beta"),
        (["distill.losses=[{name: jsd}]", "distill.loss=k1"], "distill.loss"),
        (["distill.losses=[{name: skew_kl}]", "distill.beta=0.1"], "distill.beta"),
        (["distill.loss=k1", "teacher.mass=0.9"], "teacher.mass"),
        (["distill.losses=[{name: k1}, {name: jsd}]", "distill.on_policy_share=0"], "distill.on_policy_share"),
        (["distill.loss=k2", "distill.on_policy_share=0.1", "trainer.global_batch_size=9"], "distill.on_policy_share"),
        *(
            (["teacher.tokenizer=x", setting], setting.partition("=")[0])
            for setting in (
                *("distill.loss=k1", "distill.token_weight=teachability", "distill.skip_first_tokens=2"),
                *("actor.fused_lm_head=false", "rollout.environment=a:B"),
                *("teacher.signal=logits", "distill.tail=drop", "distill.support=union"),
            )
        ),
        (["teacher.signal=units"], "teacher.signal"),
        *(
            (["teacher.tokenizer=x", "teacher.signal=units", *backend], "teacher.signal")
            for backend in (
                ("teacher.backend=local", "teacher.path=t"),
                ("teacher.backend=http", "teacher.url=[http://h]"),
            )
        ),
        (["distill.loss=sft", "distill.on_policy_share=0.9", "trainer.global_batch_size=9"], "distill.on_policy_share"),
        (["distill.losses=[{name: jsd, weight: 0}]"], "distill.losses[0].weight"),
        (["distill.losses=[{name: forward_kl}, {name: sft}]"], "distill.on_policy_share"),
        (["actor.strategy=fsdp2", "actor.tp=2", "trainer.n_gpus_per_node=2"], "actor.tp"),
        (["actor.strategy=fsdp2", "actor.pp=2", "trainer.n_gpus_per_node=2"], "actor.pp"),
        (["actor.strategy=fsdp2", "actor.vpp=2"], "actor.vpp"),
        (["actor.strategy=fsdp2", "actor.ep=2"], "actor.ep"),
        (["actor.strategy=fsdp2", "actor.recompute=selective"], "actor.recompute"),
        (["actor.strategy=fsdp2", "actor.sequence_parallel=true"], "actor.sequence_parallel"),
        (["actor.strategy=fsdp2", "actor.layers=torch"], "actor.layers"),
        (["actor.layers=te", "actor.lora.rank=8"], "actor.layers"),
        (["actor.attention=fa3", "model.dtype=float32"], "actor.attention"),
        (["weight_sync.lora=adapters", "actor.lora.rank=513"], "weight_sync.lora"),
        (["reward.functions=[{path: exact}]"], "reward.functions[0].path"),
        (["eval.metric=environment", "data.val_files=[v.jsonl]"], "eval.metric"),
        ([SHOP, "data.chat_template=never"], "rollout.environment"),
        ([SHOP, "rollout.max_turns=100", "trainer.stage_timeout_s=3000"], "rollout.environment_timeout_s"),
        (["reward.functions=[{path: length, weight: 0}]"], "reward.functions[0].weight"),
        (["reward.functions=[{path: exact_match}]", "eval.metric=none", "eval.answer_marker="], "eval.answer_marker"),
        (["reward.functions=[{path: 'a:f'}, {path: 'b:f'}]"], "reward.functions"),
        ([*REWARDS, "rollout.n=1"], "distill.advantage"),
        ([REWARDS[0], "distill.advantage=batch"], "distill.advantage"),
        ([REWARDS[0], "distill.reward_clip=[0.2, 0.3]"], "distill.reward_clip"),
        (["rollout.hang_timeout_s=2000"], "rollout.hang_timeout_s"),
        ([*BEST, "trainer.keep_best=eval/acuracy"], "trainer.keep_best"),
        ([*BEST, "trainer.keep_best=eval/pass_at_3", "eval.n=4"], "trainer.keep_best"),
        ([*BEST, "trainer.keep_best=eval/pass_at_1"], "trainer.keep_best"),
        ([*BEST, "trainer.keep_best=domain/math/accuracy"], "trainer.keep_best"),
        ([*BEST, "trainer.keep_best=eval/kl", "distill.loss=k1"], "trainer.keep_best"),
        ([*REWARDS, "distill.on_policy_share=0"], "distill.reward_weight"),
        ([*REWARDS, "rollout.temperature=0.7"], "teacher.temperature"),
        ([*REWARDS, "data.teacher_key=d", "teacher.routes={a: {}, b: {temperature: 2}}"], "teacher.temperature"),
        (["data.val_files=[v]", "trainer.keep_best=accuracy"], "trainer.keep_best"),
        (["data.val_files=[v]", "trainer.keep_best=eval/response_tokens"], "trainer.keep_best"),
        (["data.val_files=[v]", "trainer.keep_best=eval/steps"], "trainer.keep_best"),
        (["eval.metric=none", "eval.n=2"], "eval.n"),
        (["distill.support=student", "teacher.topk=64", "rollout.top_k=20"], "rollout.top_k"),
        (["distill.support=student", "rollout.top_p=0.9"], "rollout.top_p"),
        (["actor.cp=2", "trainer.n_gpus_per_node=3"], "trainer.n_gpus_per_node"),
        ([*CP, "actor.strategy=fsdp2", "actor.packing=false"], "actor.cp"),
        ([*CP, "teacher.tokenizer=t"], "teacher.tokenizer"),
        (["distill.support=union", "rollout.min_p=0.05"], "rollout.min_p"),
        (["data.val_files=[v]", "trainer.keep_best=eval/accuracy"], "trainer.keep_best"),
        (["teacher.backend=local"], "teacher.path"),
        ([*KL, "reference.update_interval=1"], "reference.update_interval"),
        ([*KL, *LORA, "reference.update_interval=2"], "reference.update_interval"),
        ([*LOCAL, "teacher.server_port=1"], "teacher.server_port"),
        (["teacher.backend=http"], "teacher.url"),
        *(
            (["teacher.backend=http", f"teacher.url='{url}'"], "teacher.url")
            for url in ("a:8000", "ftp://a", "http://", "http://a/v1", "http://a/v1/", "http://u:p@a", "http://a:99999")
        ),
        ([*HTTP, "teacher.api_key_env=sk-123"], "teacher.api_key_env"),
        ([*HTTP, "teacher.server_port=1"], "teacher.server_port"),
        ([*HTTP, "teacher.signal=hidden"], "teacher.signal"),
        ([*HTTP, "teacher.temperature=0.7"], "teacher.temperature"),
        ([*HTTP, "teacher.mass=0.9"], "teacher.mass"),
        ([*HTTP, "teacher.dialect=sglang", "distill.support=union"], "distill.support"),
        ([*ROUTES, "teacher.routes={a: {url: 'http://a'}}"], "teacher.routes.a.url"),
        (
            [*ROUTES, "teacher.routes={a: {backend: http, url: 'http://a', temperature: 2}}"],
            "teacher.routes.a.temperature",
        ),
        ([*ROUTES, "teacher.routes={a: {backend: local}}"], "teacher.routes.a.backend"),
        ([*ROUTES, "teacher.routes={a: {backend: tcp}}"], "teacher.routes.a.backend"),
        ([*LOCAL, "trainer.scheduler=one_step_off"], "trainer.scheduler"),
        ([*LOCAL, "teacher.update_interval=1"], "teacher.update_interval"),
        ([*LOCAL, "teacher.update_ema=0.5"], "teacher.update_ema"),
    ],
)
def test_contradictions_between_keys_are_found_before_anything_starts(overrides: list[str], key: str) -> None:
    """Fails if a contradiction is found by a rank that hangs or crashes minutes later."""
    with refuses(key):
        check_config(load_config(None, [*MINIMAL, *overrides]))


def test_routes_of_both_kinds_pass() -> None:
    """Fails if a route cannot have another kind of server than the others, or its URL does not become a list."""
    routes = (
        "teacher.routes={a: {backend: http, url: 'http://a'}, b: {server_port: 1}, c: {backend: http, url: [http://b]}}"
    )
    derived = check_config(load_config(None, [*MINIMAL, *ROUTES, routes, "teacher.keys=k"]))
    assert [route.teacher.url for route in derived.routes] == [["http://a"], [], ["http://b"]]


def test_a_key_that_no_route_uses_names_the_routes() -> None:
    """Fails if teacher.server_ip with HTTP routes is refused because of teacher.backend=zmq, which uses it."""
    routes = [*ROUTES, "teacher.routes={a: {backend: http, url: 'http://a'}}", "teacher.server_ip=10.0.0.1"]
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, [*MINIMAL, *routes]))
    assert caught.value.key == "teacher.server_ip" and "teacher.routes" in caught.value.problem
    assert "http" in caught.value.problem and "teacher.backend" not in str(caught.value)


def test_an_address_with_a_password_is_not_shown() -> None:
    """Fails if a password or a key that was written into the settings appears in an error."""
    for override in ("teacher.url=http://u:hidden-one@a", "teacher.api_key_env=hidden-one"):
        with pytest.raises(ConfigError) as caught:
            check_config(load_config(None, [*MINIMAL, *HTTP, override]))
        assert "hidden-one" not in str(caught.value)


def test_the_memory_of_the_scores_of_a_step() -> None:
    """Fails if the warning about large scores never appears, or always."""
    sizes = ["trainer.global_batch_size=64", "rollout.n=2", "data.max_response_length=1024", "teacher.topk=50"]
    n_tokens = 64 * 2 * 1024
    # Once in the object store, once where they are trained on.
    for signal, loss, n_bytes in (
        ("logits", "jsd", 2 * 2 * 150_000),
        ("hidden", "jsd", 2 * 4 * 4096),
        ("topk", "jsd", (8 + 12) * 50),
        ("topk", "k3", 2 * 4),
        ("sampled", "k3", 2 * 4),
    ):
        config = load_config(None, [*MINIMAL, *sizes, f"teacher.signal={signal}", f"distill.loss={loss}"])
        assert scores_gib(config, 150_000, 4096, n_heldout=0) == n_tokens * n_bytes / 2**30
    exact = load_config(None, [*MINIMAL, *sizes, "teacher.signal=logits", "teacher.wire=fp32", "actor.tp=3"])
    assert scores_gib(exact, 150_000, 4096, n_heldout=0) == (1 + 3) * n_tokens * 4 * 150_000 / 2**30
    evaluated = load_config(
        None, [*MINIMAL, *sizes, "teacher.signal=sampled", "distill.loss=k3", "eval.max_prompts=500"]
    )
    assert scores_gib(evaluated, 150_000, 4096, n_heldout=900) == 2 * 500 * 1024 * 4 / 2**30
    evaluated = evaluated.with_values({"eval.n": 3})
    assert scores_gib(evaluated, 150_000, 4096, n_heldout=900) == 3 * 2 * 500 * 1024 * 4 / 2**30


def test_a_budget_for_the_longest_sequence_passes() -> None:
    """Fails if the smallest budget that the error recommends is refused."""
    config = load_config(None, MINIMAL)
    longest = config.data.max_prompt_length + config.data.max_response_length
    check_config(config.with_values({"actor.max_tokens_per_micro_batch": longest}))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["distill.on_policy_share=0", "distill.losses=[{name: sft}]"],
        ["distill.on_policy_share=0.001", "distill.losses=[{name: k1}, {name: reverse_kl}]"],
        ["distill.on_policy_share=0.1", "distill.loss=k2", "trainer.global_batch_size=10"],
        ["distill.on_policy_share=0.9", "distill.loss=sft", "trainer.global_batch_size=10"],
        ["teacher.signal=hidden", "distill.losses=[{name: skew_kl, alpha: 0}, {name: k3}]"],
        ["teacher.mass=0.99", "distill.loss=reverse_kl", "distill.tail=renorm"],
        [*KL, "distill.importance_clip=5"],
        ["distill.loss=jsd", "distill.beta=0.1"],
        ["distill.losses=[{name: skew_reverse_kl}, {name: k1}]", "distill.alpha=0.5"],
        ["distill.loss=own:loss", "distill.beta=0.1", "distill.alpha=0.5"],
        [*LOCAL, "trainer.replay=batches", "trainer.scheduler=stream"],
        [*LOCAL, "trainer.stage_timeout_s=300"],
        [*LOCAL, "teacher.update_interval=2", "trainer.save_every=4", "trainer.resume=auto"],
        [*LOCAL, "teacher.update_interval=1", "teacher.prompt_template=Rule. {prompt}"],
        [*LOCAL, "teacher.update_interval=1", "teacher.update_ema=0.9", "teacher.fsdp_cpu_offload=false"],
        [*KL, "reference.update_interval=2"],
        [*HTTP, "teacher.url=[http://a:1, 'https://b/prefix']", "teacher.name=m", "teacher.api_key_env=KEY"],
        [*HTTP, "distill.support=union"],
        [REWARDS[0], "distill.advantage=group", "distill.reward_clip=[0.2, 0.2]"],
        [*REWARDS, "distill.advantage=batch"],
        [*BEST, "trainer.keep_best=eval/pass_at_6", "eval.n=6"],
        [*BEST, "trainer.keep_best=eval/reverse_kl", "distill.loss=k1"],
        [*BEST, "trainer.keep_best=eval/sure_and_wrong_share", "eval.metric=none"],
        [*BEST, "trainer.keep_best=domain/math/accuracy", *ROUTES, "teacher.routes={math: {}, code: {}}"],
        [*HTTP, "teacher.dialect=sglang", "teacher.signal=sampled", "distill.loss=k1"],
    ],
)
def test_combinations_with_a_meaning_pass(overrides: list[str]) -> None:
    """Fails if the defaults, or a combination at the border of a refusal, are refused."""
    check_config(load_config(None, [*MINIMAL, *overrides]))


def test_every_key_with_choices_refuses_other_values() -> None:
    """Fails if a misspelled choice is accepted."""
    keys = {name: each.key for name, each in all_keys().items() if each.key.choices}
    assert len(keys) > 15
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, [*MINIMAL, *(f"{name}=nonsense" for name in keys)]))
    errors = {error.key: error for error in (caught.value, *caught.value.more)}
    assert errors.keys() == keys.keys()
    assert all(choice in errors[name].fix for name, key in keys.items() for choice in key.choices)


def outside(each: DeclaredKey) -> list[float]:
    """Return the nearest numbers outside the bounds of a key."""
    step = 1 if each.type == "int" else 1e-9
    beyond = {"gt": 0, "ge": -step, "lt": 0, "le": step}
    bounds = {name: getattr(each.key, name) for name in beyond}
    return [bound + beyond[name] for name, bound in bounds.items() if bound is not None]


def test_every_bound_refuses_the_next_number() -> None:
    """Fails if a bound that is declared, and shown to users, is not enforced."""
    wrong = [(name, value) for name, each in all_keys().items() for value in outside(each)]
    assert len(wrong) > 60
    for name, value in wrong:
        with refuses(name):
            check_config(load_config(None, MINIMAL).with_values({name: value}))


def test_bounds_accept_what_they_include() -> None:
    """Fails if a closed bound excludes its own value, or NaN or infinity passes."""
    setting = Setting(help="", ge=1, le=2)
    assert all(map(setting.is_valid, (1, 2, 1.5))) and not any(map(setting.is_valid, (0, 3, float("nan"))))
    assert not Setting(help="", gt=1).is_valid(1) and not Setting(help="", lt=1).is_valid(1)
    assert not Setting(help="").is_valid(float("inf")) and setting.allowed() == "1 to 2"


def test_every_key_is_documented() -> None:
    """Fails if docs/configuration.md is out of date, or a help text is missing or too long for its table cell."""
    texts = {name: each.key.help.split() for name, each in all_keys().items()}
    assert not {name: len(words) for name, words in texts.items() if not 2 < len(words) <= 40}
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == with_tables(page, tables()["configuration.md"]), "run python -m tests.pages"
    assert all((ROOT / "docs" / name).is_file() for name in re.findall(r"\]\(([\w.-]+)", page))


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_load_and_pass_the_checks(file: Path) -> None:
    """Fails if a shipped config is invalid."""
    check_config(load_config(file))
