"""The engine model: one vLLM V1 instance, its KV memory, and what a step of it costs."""
