"""FreeScale for PyTorch: GPUs stop waiting for each other when sequence recommenders train on many of them.

`freescale.balancer` evens out each global batch over the ranks, `freescale.transport` moves the bytes and
`freescale.kernels` holds the jagged-tensor operations. Source: the FreeScale paper; docs/paper.md maps its sections
to files.
"""
