"""Handles files, the terminal, processes, hashes of content, and the packaged encoder `base`."""
