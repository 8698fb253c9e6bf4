"""The numbers of each step, and the file they are written to."""
