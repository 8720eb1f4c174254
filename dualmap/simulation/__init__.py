"""Simulation: an engine model, traces, replay in virtual time, and the emulator of vLLM."""
