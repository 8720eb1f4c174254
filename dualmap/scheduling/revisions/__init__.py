"""Revisions of a pool: who is served by which, and whether a new one is as good as the one before."""
