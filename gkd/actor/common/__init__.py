"""Shared by both student backends: training step, checkpoint shards, attention, agreement on errors."""
