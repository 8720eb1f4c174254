"""The operation API of a replica: instances, queues, rings, and why a request went where it went."""
