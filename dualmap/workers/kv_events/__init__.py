"""KV events: what engines report of their caches, translated and written to the store."""
