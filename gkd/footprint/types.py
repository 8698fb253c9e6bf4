"""What a footprint is: bytes by part, of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

STATES = ("weights", "gradients", "optimizer")
WEIGHT_SYNC = "weight_sync"
# Parts that are there only for a while, and never together with those of another of these moments.
MOMENTS: dict[str, tuple[str, ...]] = {
    "training_step": ("activations", "logits", "passing"),  # the fullest moment of a forward and backward pass
    "optimizer_step": ("optimizer_step",),
    WEIGHT_SYNC: (WEIGHT_SYNC,),
    "teacher_pass": ("teacher_pass",),
    "reference_pass": ("reference_pass",),
}
MOVING = (*STATES, "teacher_head")  # where states move: the teacher's LM head goes and comes with the weights
# What is in host memory at a moment, where states move there between the calls (`moved_states`).
AWAY = {WEIGHT_SYNC: ("gradients", "optimizer"), "teacher_pass": MOVING, "reference_pass": MOVING}
# Parts in host memory, whatever the rank computes on.
HOST_PARTS = ("offloaded", "moved_states", "saved_copy", "teacher_shards", "reference_shards")
# What would be used if it were there.
WANTED_PARTS = ("kv_wanted",)


@dataclass(frozen=True, slots=True)
class RankFootprint:
    """One rank's memory, bytes by part. Ranks with the same numbers have one footprint, the first of them.

    Of the device: `weights`, `gradients`, `optimizer` (moments, and the float32 masters of bfloat16 weights),
    `teacher_head`, `teacher_weights` (of a local teacher), `reference_weights`, `kv_cache` and `context` stay;
    `activations`, `logits` and `passing` (gradients on their way, gathered layers, the loss's working memory) are those
    of the fullest moment of a training step; `optimizer_step`, `weight_sync`, `teacher_pass` (a local teacher at work)
    and `reference_pass` are there when those are not. With `moved_states`, in host memory between two calls, a rank's
    states are on the device only while it needs them. `kv_wanted` is what the cache's sequences would fill; it is in no
    sum.
    """

    role: str  # "actor" | "rollout" | "teacher"
    rank: int
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The most that is on the rank's device at one time."""
        return max(self.moments().values())

    @property
    def staying_bytes(self) -> int:
        """What is on the device beside those of any moment."""
        others = {name for names in (*MOMENTS.values(), HOST_PARTS, WANTED_PARTS) for name in names}
        return sum(size for name, size in self.parts.items() if name not in others)

    def moments(self) -> dict[str, int]:
        """What is on the device in each of `MOMENTS` that this rank has."""
        moves = "moved_states" in self.parts
        found = {}
        for moment, names in MOMENTS.items():
            if moment == "training_step" or any(name in self.parts for name in names):
                away = AWAY.get(moment, ()) if moves else ()
                gone = sum(self.parts.get(name, 0) for name in away)
                found[moment] = self.staying_bytes - gone + sum(self.parts.get(name, 0) for name in names)
        return found

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state: what no smaller micro-batch makes smaller."""
        return sum(self.parts.get(name, 0) for name in STATES)

    @property
    def host_bytes(self) -> int:
        """In host memory, beside what is on the device."""
        return sum(self.parts.get(name, 0) for name in HOST_PARTS)
