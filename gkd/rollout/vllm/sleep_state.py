"""Sleep mode of one rollout engine: track which of its memory is on the GPU, and refuse calls that need the rest.

    generate -> sleep -> the actor uses the GPU -> wake_up(weights) -> receive -> wake_up(kv_cache) -> generate

Levels and tags have the meaning of vLLM's sleep mode. `SleepMixin` moves the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gkd.errors import ClusterError, ConfigError
from gkd.memory.states import GRADS, PARAMS, States
from gkd.memory.usage import read_usage, trim_heap

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class SleepState:
    """The sleeping tags of one engine; identical on all its workers.

    Args:
        call: calls a method of all workers by name with positional arguments; returns their results.
        enabled: the engine was built with sleep mode.
    """

    def __init__(self, call: Callable[..., list[Any]], *, enabled: bool) -> None:
        self._call = call
        self._enabled = enabled
        self._asleep: set[str] = set()
        self._discarded = False  # the weights were discarded, and no new version has been loaded since
        self._incomplete: set[str] = set()  # contents whose transfer began and has not ended

    def awake_tags(self, tags: Sequence[str]) -> list[str]:
        """Return the awake ones of `tags`, in the order of `TAGS`.

        Raises:
            ConfigError: the engine was built without sleep mode.
        """
        if not self._enabled:
            problem = "the rollout engines were built without sleep mode, so their memory cannot be released."
            fix = "in a pipeline of your own open_pools(config, engines_sleep=True), else trainer.colocate=true."
            raise ConfigError("engines_sleep", False, problem, fix)
        return [tag for tag in TAGS if tag in tags and tag not in self._asleep]

    def sleep(self, tags: Sequence[str], level: int) -> None:
        """Release the memory of tags that are awake. After an error they count as asleep; `wake_up` can be retried."""
        remaining = [tag for tag in TAGS if tag not in self._asleep and tag not in tags]
        self._asleep |= set(tags)
        self._discarded |= level == 2 and WEIGHTS in tags
        self._call("gkd_sleep", list(tags), remaining, level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Restore the sleeping ones of `tags`. After an error all of them still count as asleep."""
        chosen = [tag for tag in TAGS if tag in tags and tag in self._asleep]
        if chosen:
            self._call("gkd_wake", chosen, WEIGHTS in chosen and self._discarded)
            self._asleep -= set(chosen)

    def require_awake(self, tags: Iterable[str], action: str) -> None:
        """Raise ClusterError if one of the tags is asleep; `action` stands in the message: "generate"."""
        asleep = [tag for tag in tags if tag in self._asleep]
        if asleep:
            raise ClusterError(
                f"the rollout engine cannot {action}: {' and '.join(asleep)} asleep. Fix: call wake_up({asleep}) first"
            )

    def require_weights(self, action: str) -> None:
        """Raise ClusterError if the weights were discarded and not loaded since, or a transfer failed."""
        self.require_base(action)
        if self._incomplete:
            raise ClusterError(
                f"the rollout engine cannot {action}: a weight sync failed, so it has a mixture of two versions. "
                "Fix: repeat the weight sync"
            )

    def require_base(self, action: str) -> None:
        """Raise ClusterError if the weights were discarded and not loaded since."""
        if self._discarded:
            raise ClusterError(
                f"the rollout engine cannot {action}: sleep(level=2) discarded its weights. "
                "Fix: run a weight sync first, or use sleep(level=1), which keeps them in host memory"
            )

    @property
    def has_weights(self) -> bool:
        """Tell whether the engine has one complete version."""
        return not self._discarded and not self._incomplete

    @contextmanager
    def loading(self, *, adapters: bool, adapters_follow: bool = False) -> Iterator[None]:
        """Load a complete version of the weights, or of the adapters, in this context; an error leaves a mixture.

        Args:
            adapters_follow: the version is complete when its adapters have been loaded, too.
        """
        content = "adapters" if adapters else "weights"
        self._incomplete |= {content, "adapters"} if adapters_follow else {content}
        yield
        self._incomplete.discard(content)
        if not adapters:
            self._discarded = False

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes by tag on the devices, summed over all workers."""
        by_worker = self._call("gkd_memory")
        return {tag: sum(held[tag] for held in by_worker) for tag in TAGS}


def check_level(level: int) -> None:
    """Raise ClusterError if `level` is not a sleep level."""
    if level not in (1, 2):
        raise ClusterError(
            f"sleep level {level!r} is not supported. Fix: 1 (offload the weights to host memory) or 2 (discard them)"
        )


# Names of the states, as in the actor's `offload_states` -> tags of vLLM's sleep mode.
STATES = {"params": WEIGHTS, "kv_cache": KV_CACHE}


def tags_of(include: Sequence[str] | None) -> list[str]:
    """Return the tags of these states, None = all. Raises ClusterError: a rollout engine has no such state."""
    states = list(STATES if include is None else include)
    unknown = [state for state in states if state not in STATES]
    if unknown:
        raise ClusterError(f"a rollout engine has no state {unknown[0]!r}. Fix: include some of {', '.join(STATES)}")
    return [STATES[state] for state in states]


_NAN_BYTE = 0xFF  # a float of any width made of these bytes is NaN


class SleepMixin:
    """Mixin for vLLM's worker class, which provides the attributes below, `sleep`, `wake_up` and `discard`.

    It releases and restores the memory of a rollout engine's workers. On CUDA this is vLLM's sleep mode: virtual
    addresses stay, the physical memory behind them is released. vLLM's CPU worker ignores sleep, so there `States`
    moves the same tensors as it moves the actor's. No code may keep a raw address; our plain linear layers and
    experts do not.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def gkd_sleep(self, tags: list[str], remaining: list[str], level: int) -> None:
        """Release the memory of tags that are awake.

        On CUDA vLLM raises an AssertionError if the device has less free memory afterwards, so no other process may
        allocate on it during this call.

        Args:
            remaining: the other tags that are awake. vLLM cannot put the weights alone to sleep; in that case the KV
                cache is released too and restored at once, zeroed.
            level: 1 = copy the weights to host memory | 2 = keep only the model's buffers, and what no sync brings.
        """
        if level == 2 and WEIGHTS in tags and not hasattr(self, "_gkd_kept"):
            trained = {id(parameter) for parameter in self._gkd_trained().parameters()}
            parameters = self.model_runner.get_model().named_parameters()
            self._gkd_kept = {name: p.detach().cpu().clone() for name, p in parameters if id(p) not in trained}
        if self.device.type == "cpu":
            self._gkd_release(tags, level)
            return
        worker: Any = self
        if WEIGHTS in tags:
            worker.sleep(level)
            if KV_CACHE in remaining:
                self.gkd_wake([KV_CACHE], False)
        else:
            worker.discard((KV_CACHE,))

    def gkd_wake(self, tags: list[str], discarded: bool) -> None:
        """Restore tags: the weights with their old values, the KV cache zeroed.

        Args:
            discarded: no copy of the weights exists. On CPU they are filled with NaN, so that an incomplete sync is
                noticed; on CUDA they are uninitialized.
        """
        if self.device.type == "cpu":
            self._gkd_restore(tags, discarded)
            return
        worker: Any = self
        worker.wake_up(tags)
        if WEIGHTS in tags and discarded:
            self._gkd_bring_kept()
        if KV_CACHE in tags:  # uninitialized memory may be NaN, which survives attention masks
            for storage in _storages(self.model_runner.kv_caches):
                _bytes_of(storage).zero_()
            torch.cuda.synchronize(self.device)

    def gkd_memory(self) -> dict[str, int]:
        """Return bytes on the device by tag. On CUDA with sleep mode: bytes mapped by its allocator, whole pages."""
        if self.vllm_config.model_config.enable_sleep_mode:
            from vllm.device_allocator import get_mem_allocator_instance

            allocations = list(get_mem_allocator_instance().pointer_to_data.values())
            return {t: sum(a.handle[1] for a in allocations if a.tag == t and not a.is_asleep) for t in TAGS}
        return {tag: sum(s.nbytes() for s in _storages(self._gkd_tensors(tag))) for tag in TAGS}

    def gkd_process_memory(self) -> dict[str, int]:
        """Return bytes: `host_rss` of this process and, on CUDA, `device_used` by all processes on its GPU."""
        usage = read_usage(self.device)
        on_device = {} if usage.free is None or usage.total is None else {"device_used": usage.total - usage.free}
        return {"host_rss": usage.host_rss, **on_device}

    def _gkd_trained(self) -> torch.nn.Module:
        """Return the part of the model that is trained: without a vision tower, unless the student trains it.

        LLaVA-NeXT has a parameter for the ends of an image's lines, too.
        """
        model: torch.nn.Module = self.model_runner.get_model()
        trains_tower = self.vllm_config.additional_config["trains_tower"]
        trained: torch.nn.Module = model if trains_tower else getattr(model, "get_language_model", lambda: model)()
        return trained

    def _gkd_bring_kept(self) -> None:
        """Copy back the parameters that no sync brings; they never change."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        for name, kept in self._gkd_kept.items():
            parameters[name].data.copy_(kept)

    def _gkd_tensors(self, tag: str) -> Iterator[torch.Tensor]:
        if tag == KV_CACHE:
            yield from self.model_runner.kv_caches
        else:
            model = self.model_runner.get_model()
            yield from model.parameters()
            yield from model.buffers()

    def _gkd_release(self, tags: list[str], level: int) -> None:
        weights = list(self._gkd_tensors(WEIGHTS))
        model = self.model_runner.get_model()
        self._gkd_asleep: dict[str, States] = getattr(self, "_gkd_asleep", {})
        for tag in tags:
            # The names are those of `States`: parameters are copied to the host, gradients are not.
            tensors = {GRADS: self.model_runner.kv_caches}
            if tag == WEIGHTS:
                tensors = {PARAMS: weights} if level == 1 else {PARAMS: [*model.buffers()], GRADS: weights}
            self._gkd_asleep[tag] = States(self.device, partial(dict, tensors))
            self._gkd_asleep[tag].offload_states()
        trim_heap()  # glibc keeps freed blocks of up to 32 MiB

    def _gkd_restore(self, tags: list[str], discarded: bool) -> None:
        for tag in tags:
            self._gkd_asleep[tag].reload_states()
        if WEIGHTS in tags and discarded:
            for storage in _storages(self.model_runner.get_model().parameters()):
                _bytes_of(storage).fill_(_NAN_BYTE)
            self._gkd_bring_kept()


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return distinct storages in order, keyed by identity: an empty storage has no address."""
    return list({storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of the storage, [n_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
