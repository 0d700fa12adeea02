"""The command `soft-trainer`: one module a subcommand."""
