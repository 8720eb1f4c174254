"""Generators of documents: `make docs` runs them, and tests hold the pages to what they would write."""
