"""The data plane of the simulator, on torch: empty so far.

This package is where the replay of a simulated KV event trace on a real paged KV pool will live, and the timing of
attention and of token copies that goes with it. Nothing of that has been written yet, so importing it gives nothing;
the simulator in :mod:`sim` is complete without it and never imports it.
"""
