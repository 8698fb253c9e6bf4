"""On-policy distillation: a Megatron-core student, vLLM rollouts, a teacher behind ZMQ. Start at trainer.py."""

import os

# Ray calls would otherwise start a cluster, or join any that runs on this machine, whenever none is connected; so would
# calls of a thread that outlives `ray.shutdown`. Ray reads this when it is imported. `gkd.cluster.cluster` connects.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
