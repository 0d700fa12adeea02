"""Indexes the functions, classes and texts in repositories, and searches them by words or names."""

import lazy_loader

# Importing a name on first use keeps the help of the command free of NumPy. `__init__.pyi` lists the names.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
