"""Placing requests: policies, the options of serving it whole or split, and the search for an instance."""
