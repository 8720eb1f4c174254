"""The fleet and other routers in turns before the same instances: real vLLM, or emulated ones."""
