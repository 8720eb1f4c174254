"""Files and batches of all tenants, and who runs which part of them."""
