"""Write one HTML page about one or several runs: curves, samples, settings. `python -m gkd.tools.report`."""
