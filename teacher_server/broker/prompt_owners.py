"""Remember which worker had a prompt last: its engine may still have what it computed for that prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from teacher_server.broker.job import Job

_MOST = 4096  # prompts; the least recently used is forgotten
_Key = tuple[str, int]  # teacher, digest of a prompt


class PromptOwners:
    """The last worker of each prompt, for the prompts of the latest requests."""

    def __init__(self) -> None:
        self._owners: dict[_Key, bytes] = {}  # the least recently used is the first

    def __len__(self) -> int:
        return len(self._owners)

    def record(self, job: Job, worker: bytes) -> None:
        """Record that `worker` gets `job`."""
        for prompt in job.prompts:
            key = job.teacher, prompt.digest
            self._owners.pop(key, None)
            self._owners[key] = worker
        while len(self._owners) > _MOST:
            del self._owners[next(iter(self._owners))]

    def preferred(self, job: Job, blocks: Mapping[bytes, int]) -> bytes | None:
        """Return the worker that had most of the job's prompt tokens; None if none had any.

        Args:
            blocks: identity of a worker -> `Engine.prefix_block`, of the workers to choose from.
        """
        tokens: Counter[bytes] = Counter()
        for (n_prompt, _), prompt in zip(job.sequences, job.prompts, strict=False):  # without prompts: of the LM head
            owner = self._owners.get((job.teacher, prompt.digest)) or self._owners.get((job.teacher, prompt.parent))
            if owner is not None and n_prompt > blocks.get(owner, n_prompt) > 0:
                tokens[owner] += n_prompt
        return max(tokens, key=tokens.__getitem__) if tokens else None
