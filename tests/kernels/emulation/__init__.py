"""CUDA kernels on the CPU: the package's own device code and launchers, compiled by a C++ compiler.

`translate` rewrites what only nvcc reads (launches, PTX, launch bounds) in a copy of the sources; `cuda_runtime.h`,
`threads.h` and `ptx.h` stand in for the runtime, the threads of a block and the instructions; `units` compiles a copy.
A result says what the sources say. It says nothing of speed, of compilers for GPUs or of memory that blocks share.
"""
