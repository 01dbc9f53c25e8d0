"""A serving engine over the KV cache: scheduler, attention and cost models, presets, the SimPy engine, metrics."""
