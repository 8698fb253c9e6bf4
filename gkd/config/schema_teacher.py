"""Settings of the teacher, the losses and the reference: sections `teacher`, `distill` and `reference`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from gkd.config.declare import IF_MOVED, file_key, key
from teacher_server.wire.protocol import MAX_K, Signal

Tail: TypeAlias = Literal["bucket", "renorm", "drop", "residual"]
UNITS = ("nodes", "text")
BY_UNITS = "units"  # the value of teacher.signal whose lists have sums

# Name of each divergence, and of its function in gkd/loss -> the keys of `distill` that it uses.
DIVERGENCES: dict[str, tuple[str, ...]] = {
    "forward_kl": (),
    "reverse_kl": (),
    "jsd": ("beta",),
    "skew_kl": ("alpha",),
    "skew_reverse_kl": ("alpha",),
}
DIVERGENCE_NAMES = tuple(DIVERGENCES)
POLICY_GRADIENT_NAMES = ("k1", "k2", "k3")
SFT = "sft"
NORMALIZATIONS = ("token", "sequence", "domain")
RESPONSE_WEIGHTS = ("none", "pass_rate", "correct", "wrong")
SOLVED_SIBLING = "solved_sibling"
# Keys of the functions that get all responses to a prompt at once.
PROMPT_FUNCTION = "teacher.prompt_function"
RESPONSE_WEIGHT = "distill.response_weight"
GROUP_KEYS = (PROMPT_FUNCTION, RESPONSE_WEIGHT)
TOKEN_WEIGHTS = ("none", "entropy", "teachability", "position")
LOSS_NAMES = (*DIVERGENCE_NAMES, *POLICY_GRADIENT_NAMES, SFT)

MAX_NAME_LENGTH = 128  # characters of a teacher's name


class TeacherBackend(NamedTuple):
    """Hold the facts of one value of `teacher.backend`."""

    pool: str  # the pool whose processes score; empty means processes outside of the run
    model: str  # dotted key that names the teacher's model
    # Keys of `teacher` that the backend uses and at least one other backend does not. teacher.wire, request_timeout_s
    # and outage_budget_s are in no list: shared config files contain them, and other backends may ignore them.
    keys: frozenset[str]
    # Whether the teacher tells its tokens and a digest of its weights. Others are probed before the start, and what is
    # scored by them is not stored.
    is_described: bool = True


# Names of the pools.
ACTOR = "actor"
ROLLOUT = "rollout"
NONE = "none"  # no pool and no server scores
ZMQ = "zmq"
HTTP = "http"
DIALECTS = ("vllm", "sglang")
_SERVER_KEYS = "server_ip server_port name keys max_in_flight store tokenizer special_tokens"
_LOCAL_KEYS = "path fsdp_cpu_offload update_interval update_ema tokenizer special_tokens"
_HTTP_KEYS = "url dialect api_key_env name max_in_flight tokenizer special_tokens"
BACKENDS = {
    ZMQ: TeacherBackend("", "teacher.server_port", frozenset(_SERVER_KEYS.split())),
    HTTP: TeacherBackend("", "teacher.url", frozenset(_HTTP_KEYS.split()), is_described=False),
    "local": TeacherBackend(ACTOR, "teacher.path", frozenset(_LOCAL_KEYS.split())),
    "rollout": TeacherBackend(ROLLOUT, "model.path", frozenset()),
    NONE: TeacherBackend(NONE, "model.path", frozenset(f"{_SERVER_KEYS} {_LOCAL_KEYS} {_HTTP_KEYS}".split())),
}


def url_list(urls: Any) -> Any:
    """Return a list for one URL, and other values as they are."""
    return [urls] * bool(urls) if isinstance(urls, str) else urls


def _with_url_lists(routes: Any) -> Any:
    if not isinstance(routes, dict):
        return routes
    return {
        name: route | {"url": url_list(route["url"])} if isinstance(route, dict) and "url" in route else route
        for name, route in routes.items()
    }


@dataclass
class RouteConfig:
    """Entry of `teacher.routes`; what it leaves out is inherited from `teacher`."""

    backend: str | None = key(None, choices=(ZMQ, HTTP))
    name: str | None = key(None, longest=MAX_NAME_LENGTH)
    server_ip: str | None = None
    server_port: int | None = key(None, ge=1, le=65535)
    keys: str | None = None
    url: list[str] | None = None
    dialect: str | None = key(None, choices=DIALECTS)
    api_key_env: str | None = None
    temperature: float | None = key(None, ge=1e-4, le=1e4)
    weight: float = key(1.0, gt=0)


@dataclass(frozen=True)
class TeacherConfig:
    backend: str = key("zmq", choices=tuple(BACKENDS))
    """zmq: a server, `gkd teacher`. http: vLLM or SGLang (docs/http_teacher.md). local: a model on the actor's
    ranks (docs/memory.md). rollout: the student, with another prompt (docs/losses.md). Both need
    trainer.scheduler=sync and no keys of a server. none: for `gkd eval`, without KL."""
    path: str = file_key("", limits="required for local, else empty", resume=True)
    """local: the teacher, as model.path."""
    fsdp_cpu_offload: bool = key(True, resume=True)
    """local: keep the teacher's shards in host memory and one layer on the GPU. Off: they stay on the GPU, see
    memory.strategy."""
    update_interval: int = key(0, ge=0)
    """local: steps between updates of the teacher from the student's weights (self-distillation); 0 = it stays as
    it is. It needs the student's architecture, and checkpoints include it."""
    update_ema: float = key(0.0, ge=0, lt=1, limits="0 without update_interval")
    """local: an update sets the weights to update_ema x the teacher's + (1 - update_ema) x the student's; 0 = it copies
    the student's."""
    server_ip: str = key("127.0.0.1", resume=True)
    """Host name or IPv4 address of the teacher server."""
    server_port: int = key(15555, ge=1, le=65535, resume=True)
    """Port of the teacher server."""
    name: str = key("", longest=MAX_NAME_LENGTH, resume=True)
    """Name of the teacher on a server with several; empty = the only one. http: an id of its /v1/models."""
    keys: str = file_key("", resume=True)
    """Folder with server.key and client.key_secret, made by `gkd teacher keygen`; empty = no encryption."""
    url: list[str] = key([], read=url_list, limits="required for http, else empty", resume=True)
    """http: address of the server without /v1, e.g. http://127.0.0.1:8000, or a list of servers of the same model,
    which take turns."""
    dialect: str = key("vllm", choices=DIALECTS, resume=True)
    """http: what the server is, which decides the form of the requests."""
    api_key_env: str = key("", limits="name of a variable", resume=True)
    """http: environment variable with the API key, which scoring endpoints read on their host; empty = no key."""
    max_in_flight: int = key(0, ge=0, le=1 << 20, resume=True)
    """Limit of the sequences in flight at the server, over all data-parallel groups; 0 = as many as keep the server's
    workers busy (http: 32)."""
    store: str = file_key("", resume=True)
    """Folder that keeps the scores of dataset responses for later epochs and runs; empty = none. It is on each host
    of the actor pool, or shared."""
    signal: str = key("topk", choices=(*get_args(Signal), BY_UNITS))
    """Signal per response token: topk, sampled (logprob of the response token; for k1, k2, k3, sft), hidden or
    logits (all tokens), units (topk of strings of both tokenizers). Exactness: docs/losses.md."""
    topk: int = key(64, ge=1, le=MAX_K)
    """Entries of the teacher's distribution per position."""
    mass: float = key(0.0, ge=0, lt=1)
    """Keep only as many of the topk entries as needed to reach this probability mass; 0 = all topk."""
    temperature: float = key(1.0, ge=1e-4, le=1e4)
    """Temperature of the teacher's distribution; divides the student's logits, too."""
    wire: str = key("fp16", choices=("fp16", "fp32"))
    """Precision of transferred scores: fp16 (5 bytes per top-k entry) or fp32 (8 bytes, lossless). local: applies
    to signal logits only."""
    request_timeout_s: float = key(60.0, ge=1e-3, le=4e4, resume=True)
    """Seconds without a reply after which a sequence is sent again."""
    outage_budget_s: float = key(300.0, ge=1e-3, le=1e6, resume=True)
    """Seconds of silence of the server after which the run saves a checkpoint and stops."""
    routes: dict[str, RouteConfig] = key(
        {},
        read=_with_url_lists,
        example="routes, e.g. {math: {server_port: 15555}, code: {server_port: 15556, weight: 2.0}}",
        limits="names of letters, digits, _ and -; weights > 0",
        resume=IF_MOVED,
    )
    """Several teachers: for each value of data.teacher_key {backend (zmq or http), name, server_ip, server_port,
    keys, url, dialect, api_key_env, temperature, weight}, else as here; weight multiplies the loss. `default` is
    for all other rows. docs/losses.md."""
    tokenizer: str = file_key("", limits="empty with several teachers", resume=True)
    """zmq, http, local: folder with the teacher's tokenizer, if its tokens are not the student's; needs
    teacher.signal topk, hidden or units. Empty = the same tokens. docs/other_tokenizer.md."""
    special_tokens: dict[str, str] = key({}, limits="special tokens of both tokenizers")
    """Special tokens in responses that mean the same: {the student's: the teacher's}. Responses are compared up to any
    other special token."""
    prompt_template: str = key("", limits="at least one placeholder; {{ and }} for braces")
    """Prompt that the teacher scores the responses after, made of the row: a text with {prompt}, {answer} and
    {response} (the columns of data.prompt_key, answer_key, response_key) or any other {COLUMN}. Empty = that of
    data.teacher_prompt_key. docs/losses.md."""
    prompt_function: str = key("none", choices=("none", SOLVED_SIBLING), paths=True)
    """Makes the teacher's prompt of each training response, when those of its group are judged: solved_sibling = a
    correct other one as an example; module:function of a function (group) -> list of messages, texts or None.
    docs/losses.md."""

    @property
    def kind(self) -> TeacherBackend:
        """Return the facts of the backend."""
        return BACKENDS[self.backend]


@dataclass
class LossTermConfig:
    """Entry of `distill.losses`; `beta` and `alpha` default to those of `distill`."""

    name: str = key("", choices=LOSS_NAMES, paths=True)
    weight: float = key(1.0, gt=0)
    beta: float | None = key(None, gt=0, lt=1)
    alpha: float | None = key(None, ge=0, lt=1)


@dataclass(frozen=True)
class DistillConfig:
    loss: str = key("forward_kl", choices=LOSS_NAMES, paths=True)
    """Training loss. forward_kl is KL(teacher || student), reverse_kl the opposite; k1, k2, k3 estimate it from the
    sampled token; sft is cross-entropy on dataset responses. Definitions and losses of your own: docs/losses.md."""
    losses: list[LossTermConfig] = key(
        [], example="a list, e.g. [{name: jsd, weight: 0.5}, {name: k1}]", limits="each name once, weights > 0"
    )
    """Weighted sum instead of distill.loss: a list of {name, weight}, optionally with beta or alpha. Empty = use
    distill.loss."""
    beta: float = key(0.5, gt=0, lt=1)
    """jsd: share of the teacher in the mixture. Near 0 it behaves like forward_kl, near 1 like reverse_kl."""
    alpha: float = key(0.1, ge=0, lt=1)
    """skew_kl, skew_reverse_kl: share of the first distribution mixed into the second; 0 = the plain KL."""
    importance_clip: float = key(2.0, ge=0, limits="not between 0 and 1")
    """k1, k2, k3, the reference's KL and tail residual: largest importance weight of a token (probability now /
    probability at rollout); 0 = no limit."""
    on_policy_share: float = key(1.0, ge=0, le=1)
    """Share of prompts whose responses the student generates (lambda of GKD); the others use data.response_key."""
    support: str = key("teacher", choices=("teacher", "student", "union"))
    """The teacher.topk ids per position that the losses compare: the teacher's most probable ones, the student's at the
    rollout, or union = half of each. Dataset responses have the teacher's. docs/losses.md."""
    units: str = key("nodes", choices=UNITS)
    """teacher.tokenizer: what the losses compare. nodes = strings that begin tokens of both vocabularies, and the
    next byte where their tokens do not begin together; text = the next byte everywhere."""
    tail: str = key("bucket", choices=get_args(Tail))
    """Probability mass outside the teacher's top-k: bucket (one extra class), renorm (renormalize both
    distributions on the top-k), drop (omit it from the sum) or residual (bucket and a correction by the sampled
    token that makes reverse_kl unbiased)."""
    normalize: str = key("token", choices=NORMALIZATIONS)
    """Mean of the loss over a batch: token = of all tokens; sequence = of the sequences' means; domain = sum of the
    token means of each of teacher.routes."""
    skip_first_tokens: int = key(0, ge=0, limits="< data.max_response_length")
    """First tokens of each response that carry no loss in training; the mean is over the others."""
    teacher_reward_scale: float = key(1.0, ge=0)
    """k1, k2, k3: factor of the teacher's reward log p/r against the KL to the reference r (lambda of G-OPD). 1 =
    the reverse KL, without a reference; above 1 the student is moved beyond the teacher."""
    reward_weight: float = key(0.0, ge=0)
    """Weight of the clipped policy-gradient loss that trains on the rewards of reward.functions. 0 = off; they are
    reported."""
    advantage: str = key("group", choices=("group", "batch", "none"))
    """Advantage of a response with reward R: (R - mean) / (std + 1e-6) over the rollout.n responses of its prompt
    (group) or over the global batch (batch), or R itself (none)."""
    response_weight: str = key("none", choices=RESPONSE_WEIGHTS, paths=True)
    """Factor of each response's loss: pass_rate = p (1 - p), p the share of its prompt's correct responses;
    correct or wrong = only these; module:function of a function (group) -> list of factors. Their mean is 1.
    docs/losses.md."""
    reward_clip: list[float] = key([0.2, 0.2], gt=0, limits="two numbers, the first < 1")
    """Limits of the ratio probability now / probability at rollout in the loss of the rewards: from 1 - the first
    number to 1 + the second."""
    token_weight: str = key("none", choices=TOKEN_WEIGHTS)
    """Factor of each token's loss within its sequence: by the student's entropy, by teachability (the KL where the
    teacher prefers another candidate of the student), or by position (more at the start). docs/losses.md."""
    token_share: float = key(1.0, gt=0, le=1)
    """Share of each sequence's tokens, those of the largest distill.token_weight, that carry loss; the sequence's
    part of the loss stays the same."""
    token_clip: float = key(0.0, ge=0)
    """Largest value of a token's divergences, nats: a token above it counts as this value, and has no gradient. k1,
    k2, k3: bound of |log student - log teacher|. 0 = no limit."""
    reference_kl_weight: float = key(0.0, ge=0)
    """Weight of KL(student || reference), estimated as k3 on the student's tokens; see section reference. 0 = off."""


@dataclass(frozen=True)
class ReferenceConfig:
    path: str = file_key("")
    """The reference, as model.path, with the student's tokenizer. Empty = the initial student in model.path; with
    LoRA that is the actor with its adapters disabled, without a second model."""
    fsdp_cpu_offload: bool = key(True, resume=True)
    """Keep the reference's shards in host memory and one layer on the GPU. Off: they stay on the GPU, see
    memory.strategy."""
    update_interval: int = key(0, ge=0, limits="not 1")
    """Steps between updates of the reference from the student's weights; 0 = it stays as it is. It needs the
    student's architecture, and checkpoints include it. Not for actor.lora without reference.path."""


class WeightUpdates(NamedTuple):
    """How a teacher or a reference follows the student.

    Args:
        interval: steps between updates; 0 means never.
        ema: share of the old weights that an update keeps; 0 means that it copies the student's.
    """

    interval: int
    ema: float


def weight_updates(model: TeacherConfig | ReferenceConfig) -> WeightUpdates:
    """Return how a model on the actor's ranks follows the student."""
    return WeightUpdates(model.update_interval, model.update_ema if isinstance(model, TeacherConfig) else 0.0)
