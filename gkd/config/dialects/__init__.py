"""Settings of other systems as data, one TOML file for each dialect, and the code that reads them."""
