"""A study: many runs from one grid of options, in the order of their dependence, each in a separate process."""
