"""The tenants that were made in the running fleet, for all of its pools."""
