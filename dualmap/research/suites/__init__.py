"""Suites: studies that are a matrix, every variant under every workload at every rate with every seed."""
