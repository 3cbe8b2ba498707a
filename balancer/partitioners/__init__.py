"""Decides which rank trains on which sample (paper, section 4.1)."""
