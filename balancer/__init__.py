"""Balances each global batch over the ranks before it is trained on (paper, sections 3.1 and 4.1)."""
