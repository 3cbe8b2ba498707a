"""Three stages between the ranks: gather lengths, plan, shuffle samples (paper, Algorithm 1)."""
