"""Who a request is for, and what that one may use."""
