"""DARTree inside vLLM's V2 model runner: one file per seam, tensors and algorithm from the rooms below."""
