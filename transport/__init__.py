"""Moves tensors between ranks: all_gather and all_to_all, no reductions (paper, section 3.3)."""
