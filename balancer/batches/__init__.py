"""Batches of samples with lists in them, and the Arrow and Parquet data they come from (paper, section 2.1).

batch.py has `JaggedBatch`, column.py its columns; convert.py knows TorchRec's, nested and padded tensors, arrow.py
Arrow, and parquet.py streams files.
"""
