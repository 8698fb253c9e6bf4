"""Environments of users: classes that answer the student's turns, in worker processes; tools; adapters."""
