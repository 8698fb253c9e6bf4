"""Check a run before any process starts, and return what the checks found.

A mistake does not end the checks: all that have what they need are made, cheap ones first, and find the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gkd.config.declare import is_path
from gkd.config.schema import Config, Route
from gkd.config.schema_teacher import NONE, ROLLOUT
from gkd.data.prompts import load_tokenizer
from gkd.data.row_files import describe_files
from gkd.data.template import Tools
from gkd.errors import ConfigError, TeacherUnavailable
from gkd.hf.hub import FILES, MODELS, pinned_names, with_local_copies
from gkd.hf.model_folder import check_engines, eos_token_ids
from gkd.log import get_logger
from gkd.memory.footprint.estimate import scores_gib
from gkd.preflight.images import check_image_processors
from gkd.preflight.machine import check_machine, check_transformer_engine, resolve_device
from gkd.preflight.memory import check_memory
from gkd.preflight.mistakes import Mistakes, usable
from gkd.preflight.prompts import read_prompts
from gkd.preflight.replay import check_replay
from gkd.preflight.settings import (
    check_ray_installed,
    check_schedule,
    check_stream_fits,
    check_trackers_installed,
    early_end_warning,
    warn_about_settings,
)
from gkd.preflight.student import check_student, check_tokenizer_fits, chosen
from gkd.preflight.teacher import (
    check_all_stored,
    check_limits,
    check_masked,
    check_reachable,
    check_teacher,
    recorded_teachers,
    request_info,
    rollout_teacher,
    template_warning,
)
from gkd.preflight.tokenizer_pair import check_pair, tokenizer_pair
from gkd.preflight.user_code import check_functions, check_group_function
from gkd.run.folder import RunFolder
from gkd.run.open import check_run_folder, check_same_models, open_run_folder
from gkd.scoring.teacher.client import load_keys
from gkd.scoring.teacher.gpus import teacher_rows, with_own_gpus
from gkd.scoring.teacher.info import TeacherInfo, head_columns
from gkd.scoring.teacher.window import throttle_warning
from gkd.spans import driver
from gkd.text.comparison import Comparison
from gkd.text.pair import TokenizerPair
from gkd.types import Prompt

log = get_logger("preflight")


@dataclass(frozen=True, slots=True)
class Plan:
    """Results of the checks, for the launcher."""

    device: str  # "cpu" | "cuda"
    eos_ids: list[int]
    train_prompts: list[Prompt] = field(repr=False)
    val_prompts: list[Prompt] = field(repr=False)
    teachers: tuple[TeacherInfo, ...]  # one per route, see `Derived.routes`
    comparison: Comparison  # how student and teacher are compared
    total_steps: int  # optimizer steps of the whole run; the learning rate schedule ends there
    # The settings. cluster.gpus, memory.strategy and rollout.max_num_seqs are replaced by what fits, and the names of
    # the hub by their commits.
    config: Config
    data_files: list[dict[str, Any]]  # see `describe_files`
    folder: RunFolder
    tools: Tools = field(default=(), repr=False)  # rollout.environment offers them


def preflight(config: Config) -> Plan:
    """Check the whole run. The run folder is taken last, so a refused run leaves no files.

    Raises:
        ConfigError: naming key, value and fix; of several mistakes it names each, and the errors below, too.
        ModelError: the student has no end-of-sequence token.
        CheckpointError: the checkpoint to resume from is damaged.
        ClusterError: Ray is not installed.
        TeacherUnavailable: no teacher server replies at teacher.server_ip:server_port, and the run needs one.
    """
    mistakes = Mistakes()
    plan = _Checks(config, mistakes).run()
    mistakes.raise_all()
    assert plan is not None, "without a mistake there is a plan"
    return plan()


def problems(
    config: Config | None, wrong: Sequence[ConfigError] = (), *, with_teacher: bool = True
) -> list[ConfigError]:
    """Make all checks of a run that need no start, and return the mistakes in their order. Writes nothing.

    Args:
        config, wrong: as `gkd.config.load.read_config` returns them.
        with_teacher: ask the teacher's server.
    """
    mistakes = Mistakes()
    if wrong:
        mistakes.add(ConfigError.together(wrong))
    if config is not None:
        with mistakes.step("teacher.backend"):
            check_has_teacher(config)
        _Checks(config, mistakes, with_teacher=with_teacher).run()
    return mistakes.found


def check_has_teacher(config: Config) -> None:
    """Raise ConfigError if the teacher is none, with which a model can only be evaluated."""
    if config.teacher.backend == NONE:
        raise config.error("teacher.backend", "a run learns from a teacher.", "use another one; none is for gkd eval.")


class _Checks:
    """The checks of a run, in their order. Each one finds what the later ones need, and adds its mistakes.

    Args:
        with_teacher: ask the teacher's server.
    """

    def __init__(self, config: Config, mistakes: Mistakes, *, with_teacher: bool = True) -> None:
        self.config = usable(config, mistakes)
        self.mistakes = mistakes
        self.with_teacher = with_teacher
        self.on_hub: dict[str, Any] = {}  # key -> name of the hub with its commit
        self.recorded: tuple[TeacherInfo, ...] = ()  # teachers that are known without a server, see `recorded_teachers`
        self.teachers: tuple[TeacherInfo, ...] = ()
        self.device = ""  # empty: unknown
        self.n_student_vocab = 0
        self.tokenizer: Any = None
        self.other_tokenizer: Any = None  # the teacher's, if its tokens are others
        self.eos_ids: list[int] = []
        self.train: list[Prompt] | None = None
        self.val: list[Prompt] | None = None
        self.total_steps = 0
        self.comparison = Comparison()
        self.identity: dict[str, Any] = {}  # content of teacher.json

    def run(self) -> Callable[[], Plan] | None:
        """Make each check that has what it needs; return what takes the run folder, or None with a mistake."""
        self.on_hub, self.recorded = _without_torch(self.config, self.mistakes, with_teacher=self.with_teacher)
        self.teachers = self.recorded
        self._losses()
        self._download()
        log.info("checking the model, the prompts and the teacher")
        is_model = self._student()
        self._prompts()
        self._length()
        self._find_teachers()
        if not is_model:
            return None
        self.comparison = Comparison(self.config.model.n_vocab or self.n_student_vocab)
        with_gpus: Config | None = None
        with self.mistakes.step("trainer.replay", self.config.trainer.replay):
            if self.teachers and self.train is not None and self.val is not None:
                with_gpus = self._teacher_fits(self.train, self.val)
        with self.mistakes.step("model.path", self.config.model.path):
            if self.config.derived.reference_folder:
                from gkd.preflight.meta_models import check_reference  # imports torch and transformers

                self.identity["reference"] = check_reference(self.config, self.tokenizer, self.comparison.n_vocab)
        settings = self._memory(with_gpus or self.config)
        if self.mistakes.found or with_gpus is None:
            return None
        return self._plan(settings)

    def _losses(self) -> None:
        with self.mistakes.step("distill.loss"):
            if any(is_path(term.name) for term in self.config.derived.loss.terms):
                from gkd.preflight.loss_functions import check_loss_functions  # imports torch

                check_loss_functions(self.config)

    def _download(self) -> None:
        if self.on_hub and self.mistakes.found:
            names = ", ".join(self.on_hub)
            log.warning("%s: downloaded and checked when the other mistakes are corrected", names)
            self.mistakes.keys |= self.on_hub.keys()
        for key in (*MODELS, *FILES):
            if key not in self.mistakes.keys:
                with self.mistakes.step(key):
                    self.config = with_local_copies(self.config, (key,))

    def _student(self) -> bool:
        """Return whether device, sizes and tokenizer are known."""
        model = "model.path", self.config.model.path
        with self.mistakes.step("trainer.device"):
            self.device = _checked_device(self.config)
        with self.mistakes.step(*model):
            self.config = chosen(self.config)
            self.n_student_vocab = check_student(self.config)
        with self.mistakes.step(*model):
            self.tokenizer, self.eos_ids = read_tokenizer(self.config, self.n_student_vocab or sys.maxsize)
        is_model = bool(self.device and self.n_student_vocab and self.tokenizer is not None)
        if is_model:
            with self.mistakes.step(*model):
                check_engines(self.config, self.device)
        return is_model

    def _prompts(self) -> None:
        derived = self.config.derived
        self.train, self.val, self.other_tokenizer, self.tools = read_prompts(
            self.config, self.tokenizer, self.eos_ids, self.mistakes
        )
        judges = ("reward.functions", derived.rewards, self.train), ("eval.metric", derived.metrics, self.val)
        for key, paths, prompts in judges:
            with self.mistakes.step(key):
                check_functions(self.config, key, paths, prompts, self.tokenizer)
        for key, _ in derived.groups:
            if self.train and self.tokenizer is not None and "reward.functions" not in self.mistakes.keys:
                with self.mistakes.step(key):
                    check_group_function(self.config, key, self.train[0], self.tokenizer, self.tools)

    def _length(self) -> None:
        if not self.train:
            return
        with self.mistakes.step("trainer.total_steps"):
            self.total_steps = self.config.planned_steps(len(self.train))
            if warning := early_end_warning(self.config, len(self.train)):
                log.warning("%s", warning)
            check_schedule(self.config, self.total_steps)
            check_stream_fits(self.config, self.total_steps)

    def _find_teachers(self) -> None:
        if self.device and not self.teachers and (self.with_teacher or self.config.derived.teacher_pool):
            with self.mistakes.step("teacher.path", self.config.teacher.path):
                self.recorded = _known_teachers(self.config)
                self.teachers = self.recorded or find_teachers(self.config, self.device)

    def _teacher_fits(self, train: list[Prompt], val: list[Prompt]) -> Config:
        """Choose the comparison, and return the settings with the GPUs of a teacher that has some.

        Raises:
            ConfigError: student, teacher and prompts do not fit.
        """
        tokenizer = self.other_tokenizer or self.tokenizer
        self.teachers = probed_teachers(self.config, self.teachers, tokenizer, train, self.n_student_vocab)
        check_image_processors(self.config, self.teachers)
        with_gpus = self.config
        if self.device == "cuda":
            rows, _ = teacher_rows(self.config.derived.routes)
            with_gpus = with_own_gpus(self.config, self.device, rows)
        self.identity = teacher_identity(self.config.derived.routes, self.teachers)
        check_replay(self.config.with_values(self.on_hub), self.total_steps, self.identity)
        student = self.tokenizer, self.other_tokenizer, self.n_student_vocab
        self.comparison = models_compared(self.config, self.teachers, *student, self.eos_ids)
        if isinstance(self.comparison, TokenizerPair):
            check_pair(self.config, self.config.derived.routes[0], self.comparison, train)
        n_vocab = self.comparison.n_vocab
        if self.recorded:
            check_all_stored(self.config, train, self.teachers, n_vocab, self.eos_ids)
        if n_vocab < self.n_student_vocab:
            n_masked = self.n_student_vocab - n_vocab if self.device == "cuda" else 0
            is_shared = self.other_tokenizer is None
            check_masked(self.config, n_vocab, self.eos_ids, [*train, *val], n_masked=n_masked, is_shared=is_shared)
            self.config = replace(self.config, model=replace(self.config.model, n_vocab=n_vocab))
            with_gpus = replace(with_gpus, model=self.config.model)
        return with_gpus

    def _memory(self, config: Config) -> Config:
        """Return the settings with the choices that memory decides."""
        _, hidden_size = head_columns(self.teachers)  # number of columns of `hidden`: see `ScoringEndpoint.lm_head`
        n_vocab = self.comparison.n_vocab
        gib = scores_gib(self.config, n_vocab, hidden_size, len(self.val or ()))
        # The head may have the teacher's rows: the size of a head with the student's rows.
        hidden_size = -(-hidden_size * self.comparison.n_listed // n_vocab)
        with self.mistakes.step("memory.strategy"):
            config = check_memory(config, self.device, hidden_size, gib)
        warn_about_settings(self.config, gib)
        return config

    def _plan(self, config: Config) -> Callable[[], Plan] | None:
        train = self.train
        val = self.val
        assert train is not None and val is not None, "the run is whole"
        data_files = describe_files(self.config.data)
        kept = self.config.with_values(self.on_hub)
        with self.mistakes.step("trainer.run_dir", self.config.trainer.run_dir):
            check_same_models(kept, self.identity, data_files)
        log.info(
            "teacher %s (%s), %d %s token ids; %d training, %d held-out prompts; %d steps; device %s; run folder %s",
            ", ".join(teacher.model_name for teacher in self.teachers),
            self.teachers[0].engine,
            self.comparison.n_vocab,
            self.comparison.ids,
            len(train),
            len(val),
            self.total_steps,
            self.device,
            Path(self.config.trainer.run_dir).absolute(),
        )
        config = replace(config, trainer=self.config.trainer).with_values(self.on_hub)
        results = self.teachers, self.comparison, self.total_steps, config, data_files
        folder = partial(open_run_folder, kept, self.identity, data_files)
        return lambda: Plan(self.device, self.eos_ids, train, val, *results, folder(), self.tools)


def _without_torch(
    config: Config, mistakes: Mistakes, *, with_teacher: bool
) -> tuple[dict[str, Any], tuple[TeacherInfo, ...]]:
    """Check what needs no torch. Return the commits of the hub's names, and what `_known_teachers` returns."""
    on_hub: dict[str, Any] = {}
    teachers: tuple[TeacherInfo, ...] = ()
    with mistakes.step("ray", "missing"):
        check_ray_installed()
    with mistakes.step("trainer.loggers"):
        check_trackers_installed(config)
    for route in config.derived.routes:
        with mistakes.step(route.key("keys")):
            load_keys(route.teacher.keys)
    for key in (*MODELS, *FILES):
        with mistakes.step(key):
            on_hub |= pinned_names(config, (key,))
    with mistakes.step("trainer.run_dir"):
        check_run_folder(config.with_values(on_hub))
    with mistakes.step("teacher.server_ip"):
        try:
            teachers = _known_teachers(config) if with_teacher else ()
        except TeacherUnavailable as error:  # the last check tries again
            log.warning("%s; the other checks go on", error)
    return on_hub, teachers


def _known_teachers(config: Config) -> tuple[TeacherInfo, ...]:
    """Return the teachers if they are known without a server. Raises TeacherUnavailable: see `recorded_teachers`."""
    if not config.derived.teacher_pool:
        try:
            for route in config.derived.routes:
                check_reachable(route)
        except TeacherUnavailable as error:
            return recorded_teachers(config, error)
    return ()


def models_compared(
    config: Config,
    teachers: Sequence[TeacherInfo],
    tokenizer: Any,
    other_tokenizer: Any,
    n_student_vocab: int,
    eos_ids: Sequence[int],
) -> Comparison:
    """Choose how the loss compares the student with its teachers; `other_tokenizer` is a teacher's with other tokens.

    Raises:
        ConfigError: the tokenizers or the limits of a teacher do not fit.
    """
    if other_tokenizer is None:
        return Comparison(common_vocab(config, teachers, tokenizer, n_student_vocab))
    n_vocab = config.model.n_vocab or n_student_vocab
    pair = tokenizer_pair(config, tokenizer, other_tokenizer, teachers[0], n_vocab, eos_ids)
    check_limits(config, config.derived.routes[0], teachers[0], "teacher", pair.n_listed)
    return pair


def _checked_device(config: Config) -> str:
    """Return cpu or cuda. Raises ConfigError: this machine or a setting does not fit it."""
    device = resolve_device(config)
    if device == "cuda" and not config.cluster.ray_address:
        check_machine()
        if config.actor.backend.supports("layers", "te"):
            check_transformer_engine(config.actor.layers)
    return device


def read_student(config: Config) -> tuple[Any, int, list[int]]:
    """Return the student's tokenizer, the rows of its embedding, and its end tokens. Raises ConfigError, ModelError."""
    n_vocab = check_student(config)
    tokenizer, eos_ids = read_tokenizer(config, n_vocab)
    return tokenizer, n_vocab, eos_ids


def read_tokenizer(config: Config, n_vocab: int) -> tuple[Any, list[int]]:
    """Return the student's tokenizer and its end tokens; its embedding has `n_vocab` rows. Raises as `read_student`."""
    tokenizer = load_tokenizer(config.model.path, "model.path", trust_remote_code=config.model.trust_remote_code)
    check_tokenizer_fits(config, tokenizer, n_vocab)
    end_ids = eos_token_ids(config.model.path, tokenizer)
    more = config.rollout.stop_token_ids
    for key, value, ids, fix in (
        ("model.path", config.model.path, end_ids, "correct eos_token_id in generation_config.json or config.json."),
        ("rollout.stop_token_ids", more, more, "name token ids of the student."),
    ):
        if outside := [i for i in ids if not 0 <= i < n_vocab]:  # vLLM would refuse them, after the start
            problem = f"end tokens {outside} are outside of the student's {n_vocab} token ids."
            raise ConfigError(key, value, problem, fix)
    return tokenizer, sorted({*end_ids, *more})


def common_vocab(config: Config, teachers: Sequence[TeacherInfo], tokenizer: Any, n_student_vocab: int) -> int:
    """Return the number of ids that the student and all teachers share. Raises as `check_teacher`."""
    n_vocab = config.model.n_vocab or n_student_vocab
    for route, teacher in zip(config.derived.routes, teachers, strict=True):
        n_vocab = min(n_vocab, check_teacher(config, route, teacher, tokenizer, n_student_vocab))
        differing = template_warning(config.data, tokenizer, teacher, trust_remote_code=config.model.trust_remote_code)
        for warning in (throttle_warning(config.teacher, teacher), differing):
            if warning:
                log.warning("%s", warning)
    return n_vocab


def find_teachers(config: Config, device: str) -> tuple[TeacherInfo, ...]:
    """Return the description of the teacher of each route. Raises as `request_info`, or as `local_teacher`."""
    derived = config.derived
    if not derived.teacher_pool:
        with driver.doing("waiting for the teacher's description"):
            return tuple(request_info(route) for route in derived.routes)
    if derived.teacher_pool in (ROLLOUT, NONE):
        return (rollout_teacher(config, device),) * len(derived.routes)
    from gkd.preflight.meta_models import local_teacher  # imports torch and transformers

    return (local_teacher(config, device),)


def probed_teachers(
    config: Config, teachers: tuple[TeacherInfo, ...], tokenizer: Any, train: Sequence[Prompt], n_student_vocab: int
) -> tuple[TeacherInfo, ...]:
    """Return the teachers, which read the ids of `tokenizer`, with what probes tell of those that are not described.

    Raises as `gkd.preflight.http_teacher.probed`.
    """
    if config.derived.teacher_pool or all(route.teacher.kind.is_described for route in config.derived.routes):
        return teachers
    from gkd.preflight.http_teacher import probed  # imports aiohttp

    n_ids = config.model.n_vocab or n_student_vocab
    if config.teacher.tokenizer:
        n_ids = 1 + max(tokenizer.get_vocab().values())
    return tuple(
        teacher if route.teacher.kind.is_described else probed(config, route, teacher, tokenizer, train, n_ids)
        for route, teacher in zip(config.derived.routes, teachers, strict=True)
    )


def teacher_identity(routes: Sequence[Route], teachers: Sequence[TeacherInfo]) -> dict[str, Any]:
    """Return the content of teacher.json: name, fingerprint and dtype of the teacher; of several also `routes`.

    Of an HTTP teacher also the logprobs of its probe.
    """
    identities = [
        {"name": teacher.model_name, "fingerprint": teacher.fingerprint, "dtype": teacher.dtype}
        | ({"probe": list(teacher.probe.logprobs)} if teacher.probe else {})
        for teacher in teachers
    ]
    if not routes[0].name:
        return dict(identities[0])
    return {**identities[0], "routes": {route.name: one for route, one in zip(routes, identities, strict=True)}}
