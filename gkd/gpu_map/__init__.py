"""Reports which rank is on which GPU, and finds problems of the placement."""
