"""Settings of verl, TRL, slime and ROLL: each old name with the key here, the conversion of its value, and a remark."""
