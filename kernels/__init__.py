"""Jagged-tensor operations: copy ranges of rows from one buffer to another (paper, section 4.2)."""
