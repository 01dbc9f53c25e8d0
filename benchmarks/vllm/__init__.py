"""Our scheduler beside real vLLM's: the same cases, step by step, and the speed of both."""
