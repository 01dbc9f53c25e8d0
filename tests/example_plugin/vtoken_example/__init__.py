"""A policy, a reclaimer, a trace reader, two cost models and an attention model, added from outside."""
