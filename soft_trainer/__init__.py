"""Fine-tune code-search encoders with Soft-InfoNCE, a version of InfoNCE with weighted in-batch negatives."""

import lazy_loader

__version__ = "0.1.0"

# Importing a name on first use keeps `import soft_trainer` free of torch and datasets. `__init__.pyi` lists the names.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
