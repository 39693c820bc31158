"""Measurements that decide: which row runs a call, and on what tiles a kernel works.

Above the kernels, the timing harness and the verifier: it times what is proven, and proves what it writes.
"""
