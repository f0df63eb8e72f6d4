"""The server and the command line of FlashCore, with the shared libraries that they need.

Nothing to import: `flashcore serve` runs the server, and the package `flashcore` is the Python client.
"""
