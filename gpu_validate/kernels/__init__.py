"""Triton kernels: on a GPU as they are, on a CPU in Triton's interpreter (TRITON_INTERPRET=1 before it is imported)."""
