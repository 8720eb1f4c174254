"""How many instances a pool has, and which role each of them serves."""
