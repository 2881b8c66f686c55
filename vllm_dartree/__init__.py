"""DARTree: lossless speculative decoding with causally corrected draft trees, as a plugin for vLLM."""

__version__ = "0.1.0"
