"""Makes the runs of a study, and compares and reports finished ones."""
