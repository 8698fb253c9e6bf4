"""Write a YAML of this system from the settings of verl, TRL, slime or ROLL."""
