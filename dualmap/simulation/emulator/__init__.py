"""The engine model behind vLLM's HTTP interface: same scheduler, same clock times a factor, no accelerator."""
