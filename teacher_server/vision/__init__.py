"""Images of requests: decode them within limits, and prepare them for a model, the same in every process."""
