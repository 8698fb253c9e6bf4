"""A small run with images, and settings for GPUs."""
