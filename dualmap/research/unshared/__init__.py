"""Router replicas that share no store: each with books of its own, and a view of the load."""
