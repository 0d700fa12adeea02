"""What the package needs of the system around it: files, the terminal, processes, hashes of content, `base`."""
