"""Show on the terminal what a run does: one line per step or a live panel, phases, and a closing table."""
