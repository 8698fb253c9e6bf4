"""The first run: a task and two small models made on the spot, and the commands of a user run in order."""
