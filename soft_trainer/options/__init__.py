"""The options of a run: declared, parsed and refused."""
