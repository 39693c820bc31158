"""How fast a whole engine is, and how a server holds up under load, each figure beside the limit that it is held to.

The harness for kernels is `rapid_llm.bench`; this is about what users see: tokens on the host, answers over HTTP.
Clocks, devices and engines are arguments, so that all of it is tested without time passing. Importing it imports no
torch.
"""
