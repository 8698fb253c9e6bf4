"""On-policy distillation: a Megatron-core student, vLLM rollouts, a teacher behind ZMQ. Start at trainer.py."""
