"""The process and its surroundings: clock, limit of open files, trusted certificates, this package as installed."""
