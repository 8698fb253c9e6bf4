"""Code that both student backends share: training step, checkpoint shards, attention, agreement on errors."""
