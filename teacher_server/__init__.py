"""The teacher server: a ZMQ broker and engine workers that return a teacher's logprobs. Knows nothing of gkd."""
