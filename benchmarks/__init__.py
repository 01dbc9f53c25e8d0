"""Speed and memory of the simulator, as ratios measured in one run (README.md); ``python -m benchmarks``."""
