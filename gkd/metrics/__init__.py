"""The numbers of each step, the file they are written to, and the health checks that judge them."""
