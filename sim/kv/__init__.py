"""The control plane of vToken: blocks, token table, repack, policies, reclaimers. No clock, no SimPy, no torch."""
