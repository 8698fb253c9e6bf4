"""Reports which rank is on which GPU, and what is wrong with the assignment."""
