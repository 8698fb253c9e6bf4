"""Sleep mode of one rollout engine: track which of its memory is on the GPU, and refuse calls that need the rest.

    generate -> sleep -> the actor uses the GPU -> wake_up(weights) -> receive -> wake_up(kv_cache) -> generate

Levels and tags have the meaning of vLLM's sleep mode. `gkd.rollout.sleep_mixin` moves the memory. No vLLM import here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gkd.errors import ClusterError, ConfigError

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class SleepState:
    """The sleeping tags of one engine; identical on all its workers.

    Args:
        call: calls a method of all workers by name with positional arguments; returns their results.
        enabled: the engine was built with sleep mode.
    """

    def __init__(self, call: Callable[..., list[Any]], *, enabled: bool) -> None:
        self._call, self._enabled = call, enabled
        self._asleep: set[str] = set()
        self._discarded = False  # the weights were discarded, and no new version has been loaded since
        self._incomplete: set[str] = set()  # contents whose transfer began and has not ended

    def awake_tags(self, tags: Iterable[str]) -> list[str]:
        """Return the awake ones of `tags`, in the order of `TAGS`.

        Raises:
            ClusterError: unknown tag.
            ConfigError: the engine was built without sleep mode.
        """
        chosen = _ordered(tags)
        if not self._enabled:
            problem = "the rollout engines were built without sleep mode, so their memory cannot be released."
            raise ConfigError("rollout.enable_sleep_mode", False, problem, "use true.")
        return [tag for tag in chosen if tag not in self._asleep]

    def sleep(self, tags: Sequence[str], level: int) -> None:
        """Release the memory of tags that are awake. After an error they count as asleep; `wake_up` can be retried."""
        remaining = [tag for tag in TAGS if tag not in self._asleep and tag not in tags]
        self._asleep |= set(tags)
        self._discarded |= level == 2 and WEIGHTS in tags
        self._call("gkd_sleep", list(tags), remaining, level)

    def wake_up(self, tags: Iterable[str]) -> None:
        """Restore the sleeping ones of `tags`. After an error all of them still count as asleep.

        Raises ClusterError: unknown tag.
        """
        chosen = [tag for tag in _ordered(tags) if tag in self._asleep]
        if chosen:
            self._call("gkd_wake", chosen, WEIGHTS in chosen and self._discarded)
            self._asleep -= set(chosen)

    def require_awake(self, tags: Iterable[str], action: str) -> None:
        """Raise ClusterError if one of the tags is asleep.

        Args:
            action: what the caller is about to do, for the message: "generate".
        """
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
    def loading(self, *, adapters: bool) -> Iterator[None]:
        """Load a complete version of the weights, or of the adapters, in this context; an error leaves a mixture."""
        content = "adapters" if adapters else "weights"
        self._incomplete.add(content)
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


def _ordered(tags: Iterable[str]) -> list[str]:
    wanted = list(tags)
    unknown = [tag for tag in wanted if tag not in TAGS]
    if unknown:
        raise ClusterError(f"a rollout engine has no tag {unknown[0]!r}. Fix: use some of {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in wanted]
