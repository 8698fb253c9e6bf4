"""The broker: one thread between clients and workers."""
