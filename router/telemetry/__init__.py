"""What a replica counts and records while it serves, and the metrics that it shows."""
