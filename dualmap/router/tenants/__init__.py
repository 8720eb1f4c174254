"""Who sends a request, and what its client is told of its limits."""
