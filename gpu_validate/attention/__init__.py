"""Decode attention over the paged pool: one seam, several backends."""
