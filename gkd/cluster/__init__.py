"""Ray: resource pools, calls that never wait in silence, which rank sits where."""
