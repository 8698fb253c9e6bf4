"""Send the actor's weights to the rollout engines: export, buckets, broadcast, verification by digests."""
