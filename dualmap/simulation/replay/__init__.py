"""A trace through a live endpoint: requests as bytes, their answers, and the figures of both."""
