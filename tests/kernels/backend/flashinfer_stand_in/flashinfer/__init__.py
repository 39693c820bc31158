"""A stand-in for flashinfer 0.6.7: its signatures, its demands and its roundings, computed in torch on the CPU.

What upstream would misread (strides, dtypes, alignments it does not look at) is an AssertionError here.
"""

__version__ = "0.6.7"
