"""Shared state of pools (``pool``), on Redis (``redis``) or on a server in the process (``memory``)."""
