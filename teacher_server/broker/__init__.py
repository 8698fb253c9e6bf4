"""Broker: one thread that queues requests, assigns them to workers, and checks and forwards the replies."""
