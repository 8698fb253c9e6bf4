"""Checks everything that can be checked before a process starts."""
