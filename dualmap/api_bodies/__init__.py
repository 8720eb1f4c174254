"""Bodies of the APIs of OpenAI and Anthropic, read as vLLM reads them. Pure; for the router and the emulator alike."""
