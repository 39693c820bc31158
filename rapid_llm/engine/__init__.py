"""The engine: requests, their schedule, the key/value cache, sampling, text. Its parts are imported by module."""
