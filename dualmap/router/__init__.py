"""The data plane: OpenAI-compatible HTTP at protocol level, and the life of a request."""
