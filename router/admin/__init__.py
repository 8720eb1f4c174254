"""The operators' side of a replica: instances, queues, rings, and why a request went where it went."""
