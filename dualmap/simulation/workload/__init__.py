"""The traffic of a run: traces and their generators, arrivals, tenants, and prompts as text."""
