"""The process of a replica: its ports, its start and its end, and what it answers beside inference."""
