"""The server's settings: one table of options, read from flags and YAML."""
