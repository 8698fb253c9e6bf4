"""Teacher server: a ZMQ broker and engine workers that compute a teacher's logprobs. Does not import gkd."""
