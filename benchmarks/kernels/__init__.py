"""One declarative file an op: what varies, which peers there are, and how one call's arguments are made."""
