"""FreeScale for PyTorch: GPUs stop waiting for each other when sequence recommenders train on many of them.

`freescale.balancer` evens out each global batch over the ranks, `freescale.embedding` hides the traffic of embedding
tables, `freescale.transport` moves the bytes, `freescale.kernels` holds the jagged-tensor operations, and
`freescale.bench` measures. Source: the FreeScale paper; docs/paper.md maps its sections to files.
"""
