"""Score and judge chunks of rollouts: one endpoint per data-parallel group, and the driver side of all endpoints."""
