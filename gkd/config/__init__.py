"""Every setting of a run, its limits, and the checks of settings against each other. No torch."""
