"""Memory of a rank: offloaded states, usage, tensor referrers, out-of-memory reports, and remedies."""
