"""External libraries: one package each, with its probe, its install recipe and the adapters to the ops' signatures.

Importing a library's package here imports neither the library nor torch; only its adapter modules do, and these are
loaded after the probe has tried the library in a child process.
"""
