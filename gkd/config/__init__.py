"""Declare, load and check the settings of a run, without torch."""
