"""Command-line tools around a run."""
