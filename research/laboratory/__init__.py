"""The policy laboratory: variants of policies and settings over traces, fleets, rates and seeds, with confidence."""
