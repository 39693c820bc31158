"""Model files: finding, reading, configuring and loading them, and the one decoder that runs them."""
