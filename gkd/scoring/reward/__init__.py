"""Rewards of the student's responses: functions in worker processes, advantages, and the metric of evaluations."""
