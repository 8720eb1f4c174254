"""A request as its client sent it, and its prompt, read for the router's own estimate."""
