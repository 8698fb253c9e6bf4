"""Write a YAML of this system from the settings of another one."""
