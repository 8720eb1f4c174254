"""One replica, put together: its pools, its lease, its background work. Everything but the network."""
