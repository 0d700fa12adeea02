"""Implements the command `soft-trainer`, with one module per subcommand."""
