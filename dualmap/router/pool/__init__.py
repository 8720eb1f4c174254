"""One pool as a replica knows it: its members, its queues, its store, and what outlives the store."""
