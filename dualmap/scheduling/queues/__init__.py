"""The order of held requests: which one is dispatched next, and which ones move to another instance."""
