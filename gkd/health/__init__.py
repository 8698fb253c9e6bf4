"""Judge from the metrics whether a run is healthy; log alarms, pause or stop the run. No torch."""
