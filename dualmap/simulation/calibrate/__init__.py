"""Measuring a real engine, and the figures with which the engine model behaves like it."""
