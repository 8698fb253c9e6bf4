"""Programs that use the project: the quickstart, a pipeline of your own, a loss of your own."""
