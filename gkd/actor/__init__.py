"""The student in training: its Ray surface and pool; `megatron/` is the student itself."""
