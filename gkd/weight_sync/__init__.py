"""Actor weights to rollout engines: export, buckets, broadcast, and the proof that they arrived."""
