"""Runs, sweeps, their results on disk, tables and plots."""
