"""Tools for whoever writes kernels: scaffolds that pass at once, and checks of this code base's conventions.

Nothing here imports torch, and nothing is written before the whole plan is known to fit.
"""
