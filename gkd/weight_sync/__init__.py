"""Move the actor's weights to the rollout engines: buckets, transports, digests. `gkd.rollout.driver` starts it."""
