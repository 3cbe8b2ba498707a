"""Batches of samples with lists in them, and the Arrow and Parquet data they come from (paper, section 2.1)."""
