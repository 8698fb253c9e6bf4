"""Models that score and never learn, on the actor's own ranks and devices: a teacher without a server."""
