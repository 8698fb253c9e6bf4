"""Environments with tools, for `rollout.environment`."""
