"""The run folder: what a run keeps on disk, how it resumes, and how it ends."""
