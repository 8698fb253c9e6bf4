"""Config: loading YAML and overrides, limits, contradictions, documentation."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gkd.config.check import check_config
from gkd.config.declare import Key
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.config.schema_sections import RewardFunctionConfig, all_keys
from gkd.config.schema_teacher import LossTermConfig, RouteConfig
from gkd.errors import ConfigError
from gkd.memory.footprint.estimate import scores_gib
from teacher_server.config.declare import Declared, Setting
from tests.pages import tables, with_tables
from tests.refusals import refuses

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r"]
REWARDS = ["reward.functions=[{path: length}]", "distill.reward_weight=1", "rollout.n=2"]
KL = ["distill.reference_kl_weight=0.1"]
LOCAL = ["teacher.backend=local", "teacher.path=t"]
HTTP = ["teacher.backend=http", "teacher.url=http://127.0.0.1:8000"]
BEST = ["data.val_files=[v]", "eval.metric=exact_match"]
ROUTES = ["data.teacher_key=d"]
LENGTHS = ["data.max_prompt_length=8", "data.max_response_length=16"]


def numbers(setting: Setting) -> st.SearchStrategy[float]:
    """Return the valid numbers of a setting."""
    low = setting.ge if setting.gt is None else setting.gt
    high = setting.le if setting.lt is None else setting.lt
    return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(setting.is_valid)


def integers(setting: Setting) -> st.SearchStrategy[int]:
    """Return the valid integers of a setting, from at most 1000 on."""
    low = int(setting.ge if setting.gt is None else setting.gt) if (setting.ge, setting.gt) != (None, None) else None
    return st.integers(low, None if setting.le is None else int(setting.le)).filter(setting.is_valid)


TRICKY = ["", " a", "off", "no", "null", "~", "1e3", "010", "1:30", "2024-01-01", "# x", "<<", "a ${model.path}"]
TRICKY += [r"\${x", "\\", "Be brief.\n\n- No lists.\n# End", "a\r\nb", "hi # there", "{prompt} {answer}"]
TEXTS = st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TEXTS = TEXTS.filter(lambda text: text != "???")  # Hydra's mark of a missing value
PATHS = TEXTS.filter(lambda text: "$" not in text and "~" not in text)  # which stand for other texts
OF_ANY_TYPE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ENTRIES: dict[str, st.SearchStrategy[object]] = {
    "list[LossTermConfig]": st.lists(st.builds(LossTermConfig, TEXTS, st.floats(0, 1), st.none() | st.floats(0, 1))),
    "list[RewardFunctionConfig]": st.lists(st.builds(RewardFunctionConfig, TEXTS, st.floats(-9, 9))),
    "dict[str, RouteConfig]": st.dictionaries(
        TEXTS,
        st.builds(RouteConfig, name=st.none() | TEXTS, server_port=st.none() | st.integers(), url=st.lists(TEXTS)),
    ),
}


def values(key: Declared[Key]) -> st.SearchStrategy[object]:
    """Return the values of a key's type, inside its limits if it is a number or has choices."""
    setting = key.setting
    texts = PATHS if setting.is_file else TEXTS
    of_type: dict[str, st.SearchStrategy[object]] = {
        "int": integers(setting),
        "float": numbers(setting),
        "bool": st.booleans(),
        "bool | None": st.none() | st.booleans(),
        "str": st.sampled_from(setting.choices) if setting.choices else texts,
        "int | str": st.integers() | st.sampled_from(["30min", "2 h"]),
        "list[str]": st.lists(texts, max_size=3),
        "list[int]": st.lists(integers(setting), max_size=3),
        "list[float]": st.lists(numbers(setting), max_size=3),
        "dict[str, float]": st.dictionaries(TEXTS, numbers(setting), max_size=3),
        "dict[str, list[list[float]]]": st.dictionaries(TEXTS, st.lists(st.lists(numbers(setting)))),
        "dict[str, str]": st.dictionaries(TEXTS, TEXTS, max_size=3),
        "dict[str, Any]": st.dictionaries(TEXTS, OF_ANY_TYPE, max_size=3),
    }
    return (of_type | ENTRIES)[key.type]


CONFIGS = st.fixed_dictionaries({}, optional={name: values(key) for name, key in all_keys().items()}).map(
    Config().with_values
)


@settings(max_examples=50, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=CONFIGS)
def test_a_saved_config_loads_as_itself(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fails if the config.yaml of a run or checkpoint does not describe its run, whatever its texts are."""
    file = tmp_path_factory.getbasetemp() / "saved.yaml"
    file.write_text(config_yaml(config), encoding="utf-8")
    assert load_config(file) == config


@settings(max_examples=100, derandomize=True)
@given(text=TEXTS.filter(lambda text: text.lstrip()[:1] not in ("'", '"') and text not in ("null", "~")))
@example(r"a \${model.path} ${x")
def test_a_text_of_the_command_line_is_kept_as_it_is(text: str) -> None:
    """Fails if a prompt of the command line is cut at a `#` or loses its lines, or a name becomes a number."""
    written = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # a ${ would stand for another key
    assert load_config(None, [f"data.system_prompt={written}"]).data.system_prompt == text


def test_overrides_win_over_later_files_and_those_over_earlier_ones(tmp_path: Path) -> None:
    """Fails if a file or an override is ignored, or lists of two files are joined; or the integer 8.0 is refused."""
    (tmp_path / "base.yaml").write_text(
        "rollout: {tp: 2, max_num_seqs: 8.0}\ndata: {train_files: [a.jsonl, b.jsonl]}\nactor: {optim: {lr: 0.5}}\n"
    )
    (tmp_path / "mine.yaml").write_text("rollout: {tp: 4, n: 3}\ndata: {train_files: [c.jsonl]}\n")
    files = [tmp_path / "base.yaml", tmp_path / "mine.yaml"]
    config = load_config(files, ["rollout.n=4", "actor.optim.betas=[0.8, 0.9]"])
    assert (config.rollout.tp, config.rollout.max_num_seqs, config.rollout.n, config.actor.pp) == (4, 8, 4, 1)
    assert config.data.train_files == ["c.jsonl"]
    assert (config.actor.optim.lr, config.actor.optim.betas) == (0.5, [0.8, 0.9])


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
    """Fails if a column named no or 1e3 becomes False or 1000.0, in the file."""
    file = tmp_path / "x.yaml"
    file.write_text(f"data: {{answer_key: {text}, response_key: '{text}'}}\ntrainer:\n  progress: off\n")
    config = load_config(file, MINIMAL)
    assert (config.data.answer_key, config.data.response_key, config.trainer.progress) == (text, text, "off")


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


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("actor.tpp=2", "actor.tpp", "actor.tp"),
        ("rollot.n=2", "rollot.n", "rollout.n"),
        ("actor.tp=two", "actor.tp", ""),
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


def test_routes_of_both_kinds_pass() -> None:
    """Fails if a route cannot have another kind of server than the others, or its URL does not become a list."""
    routes = (
        "teacher.routes={a: {backend: http, url: 'http://a'}, b: {server_port: 1}, c: {backend: http, url: [http://b]}}"
    )
    derived = check_config(load_config(None, [*MINIMAL, *ROUTES, routes, "teacher.keys=k"]))
    assert [route.teacher.url for route in derived.routes] == [["http://a"], [], ["http://b"]]


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
        ["cluster.teacher_gpu_share=0.1", "rollout.gpu_memory_utilization=0.95", "rollout.kv_cache_mib=64"],
        [REWARDS[0], "distill.advantage=group", "distill.reward_clip=[0.2, 0.2]"],
        [*REWARDS, "distill.advantage=batch"],
        [*BEST, "trainer.keep_best=eval/pass_at_6", "eval.n=6"],
        [*BEST, "trainer.keep_best=eval/reverse_kl", "distill.loss=k1"],
        [*BEST, "trainer.keep_best=eval/sure_and_wrong_share", "eval.metric=none"],
        [*BEST, "trainer.keep_best=domain/math/accuracy", *ROUTES, "teacher.routes={math: {}, code: {}}"],
        [*HTTP, "teacher.dialect=sglang", "teacher.signal=sampled", "distill.loss=k1"],
        [*LENGTHS, "actor.max_tokens_per_micro_batch=24"],  # the longest sequence
    ],
)
def test_combinations_with_a_meaning_pass(overrides: list[str]) -> None:
    """Fails if the defaults, or a combination at the border of a refusal, are refused."""
    check_config(load_config(None, [*MINIMAL, *overrides]))


def as_value(key: Declared[Key], part: object) -> object:
    """Return a value of a key's type with this part."""
    return [part] if key.type.startswith("list") else {"truncated": part} if key.type.startswith("dict") else part


def test_every_key_with_choices_refuses_other_values() -> None:
    """Fails if a misspelled choice is accepted, also in a list or as a name."""
    keys = {name: each for name, each in all_keys().items() if each.setting.choices}
    assert len(keys) > 15
    wrong = {name: {"nonsense": 1} if "dict" in key.type else as_value(key, "nonsense") for name, key in keys.items()}
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, MINIMAL).with_values(wrong))
    errors = {error.key: error for error in (caught.value, *caught.value.more)}
    assert errors.keys() == keys.keys()
    assert all(choice in errors[name].fix for name, key in keys.items() for choice in key.setting.choices)


def outside(each: Declared[Key]) -> list[float]:
    """Return the nearest numbers outside the bounds of a key."""
    step = 1 if each.type == "int" else 1e-9
    beyond = {"gt": 0, "ge": -step, "lt": 0, "le": step}
    bounds = {name: getattr(each.setting, name) for name in beyond}
    return [bound + beyond[name] for name, bound in bounds.items() if bound is not None]


def test_every_bound_refuses_the_next_number() -> None:
    """Fails if a bound that is declared, and shown to users, is not enforced."""
    wrong = [(name, as_value(each, value)) for name, each in all_keys().items() for value in outside(each)]
    assert len(wrong) > 60
    for name, value in wrong:
        with refuses(name):
            check_config(load_config(None, MINIMAL).with_values({name: value}))


def test_bounds_accept_what_they_include() -> None:
    """Fails if a closed bound excludes its own value, or NaN or infinity passes."""
    setting = Setting(ge=1, le=2)
    assert all(map(setting.is_valid, (1, 2, 1.5))) and not any(map(setting.is_valid, (0, 3, float("nan"))))
    assert not Setting(gt=1).is_valid(1) and not Setting(lt=1).is_valid(1)
    assert not Setting().is_valid(float("inf")) and setting.allowed() == "1 to 2"


def test_every_key_is_documented() -> None:
    """Fails if docs/configuration.md is out of date, or a help text is missing or too long for its table cell."""
    texts = {name: each.help.split() for name, each in all_keys().items()}
    assert not {name: len(words) for name, words in texts.items() if not 2 < len(words) <= 40}
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == with_tables(page, tables()["configuration.md"]), "run python -m tests.pages"
    assert all((ROOT / "docs" / name).is_file() for name in re.findall(r"\]\(([\w.-]+)", page))
