"""The tenants of requests, and what each may use."""
