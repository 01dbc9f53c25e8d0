"""The data plane on torch: what the simulator says about KV memory, done on a real paged pool.

Replays a KV event log (``vtoken run --events``) step by step with real attention kernels and real token copies, judges
the result, and measures what it costs. Of :mod:`sim` it shares the vocabulary, the interpreter of events, the planner
of repacks and the cost profile; it runs where neither the engine nor SimPy is installed. Importing the package imports
no torch.
"""
