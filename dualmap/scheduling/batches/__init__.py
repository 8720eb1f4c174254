"""Batches of requests that nobody waits for: their states, and the room that interactive work leaves them."""
