"""Drafters as vLLM models that also give a correction head."""
