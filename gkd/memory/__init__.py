"""Memory of a rank: offloaded states, usage, out-of-memory reports, and remedies."""
