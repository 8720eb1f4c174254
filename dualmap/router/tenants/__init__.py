"""The callers of requests, and the reports of limits to clients."""
