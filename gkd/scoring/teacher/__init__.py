"""The trainer's side of the teacher: what a teacher is, the ZMQ client."""
