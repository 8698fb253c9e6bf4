"""Runs the ranks on Ray: resource pools, calls with time-outs, start-up progress, hang reports, GPU placement."""
