"""Write one HTML page about one or several runs: curves, samples, settings. `gkd report`."""
