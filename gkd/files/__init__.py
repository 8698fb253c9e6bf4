"""Write files durably, and keep the digests of what was written."""
