"""The server's settings, declared once, read from flags and YAML, and checked."""
