"""Batches of requests that no client waits for: their states, and the room that interactive work leaves them."""
